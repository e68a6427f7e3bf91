"""Every field of every request is checked here, before anything is done with it.

`fields.check` walks a message by its descriptor with the table of `rules`; `generate` adds what concerns several fields
or the model. Nothing is silently ignored: unknown fields are violations too. Knows no RPC, no worker.
"""
