"""Who may call what: API keys, client certificates, scopes, tenants. Knows no text, no workers, no streams."""
