"""Schemas of structured output, and a value that fits each.

Must not know: libraries, tokens.
"""

from typing import Any

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "flat object": (
        {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
         "required": ["name", "age"], "additionalProperties": False},
        {"name": "Bob Löwe lives in the 北京 quarter of a long name", "age": 42},
    ),
    "nested": (
        {"type": "object", "additionalProperties": False, "required": ["order", "lines"], "properties": {
            "order": {"type": "object", "additionalProperties": False, "required": ["id", "date", "status"],
                      "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
                                     "date": {"type": "string", "format": "date"},
                                     "status": {"enum": ["new", "paid", "shipped"]}}},
            "lines": {"type": "array", "minItems": 1, "maxItems": 9, "items": {"$ref": "#/$defs/line"}}},
         "$defs": {"line": {"type": "object", "additionalProperties": False, "required": ["sku", "count"],
                            "properties": {"sku": {"type": "string", "maxLength": 40},
                                           "count": {"type": "integer", "minimum": 1, "maximum": 99},
                                           "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}},
        {"order": {"id": "AB-123456", "date": "2024-02-29", "status": "paid"},
         "lines": [{"sku": "table, oak, two metres", "count": 1, "note": "deliver on a Tuesday"},
                   {"sku": "chair", "count": 6, "note": None}]},
    ),
    "free text": (
        {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"],
         "additionalProperties": False},
        {"answer": "Once upon a time there was a little fox who lived by the sea, and every day it went out. " * 4},
    ),
}  # fmt: skip
