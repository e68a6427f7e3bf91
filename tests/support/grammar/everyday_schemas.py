# ruff: noqa: E501
"""Sixty JSON schemas like those that people send, by name: manifests, workflows, API objects, extraction forms.
`REFUSED`: those that cannot be served exactly, with the path at fault."""

from typing import Any

Json = dict[str, Any]
STRING: Json = {"type": "string", "maxLength": 12}
INTEGER: Json = {"type": "integer", "minimum": 0, "maximum": 999}
NAMES: Json = {"type": "array", "items": STRING, "maxItems": 3}
BOOLEAN: Json = {"type": "boolean"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def closed(required: str = "", /, **properties: Any) -> Json:
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def tagged(tag: str, **properties: Any) -> Json:
    """An option of a union."""
    return closed(f"type {' '.join(properties)}", type={"const": tag}, **properties)


def text_map(**more: Any) -> Json:
    """An object that maps names to texts."""
    return {"type": "object", "additionalProperties": STRING, "maxProperties": 3} | more


PACKAGE_NAME: Json = {"type": "string", "pattern": "^(?:@[a-z0-9-]{1,8}/)?[a-z0-9-]{1,10}$", "maxLength": 20}
VERSION: Json = {"type": "string", "pattern": r"^\d{1,2}\.\d{1,2}\.\d{1,2}$"}
PERSON: Json = {
    "oneOf": [STRING, closed("name", name=STRING, email={"type": "string", "format": "email", "maxLength": 20})]
}
STEP: Json = closed(
    "", name=STRING, uses=STRING, run=STRING, **{"with": text_map(propertyNames={"pattern": "^[a-z-]+$"})}
) | {"oneOf": [{"required": ["uses"]}, {"required": ["run"]}], "dependencies": {"with": ["uses"]}}
PORT: Json = {"type": "integer", "minimum": 1, "maximum": 65535}
MONEY: Json = closed("amount currency", amount={"type": "number", "minimum": 0, "multipleOf": 0.01, "maximum": 10000},
                     currency={"enum": ["EUR", "USD", "JPY"]})  # fmt: skip
ADDRESS: Json = closed("country", country={"enum": ["US", "CA", "NL"]}, postcode=STRING, state=STRING) | {
    "allOf": [
        {"if": {"properties": {"country": {"const": "US"}}},
         "then": {"required": ["state"], "properties": {"postcode": {"pattern": r"^\d{5}$"}}}},
        {"if": {"properties": {"country": {"const": "NL"}}},
         "then": {"properties": {"postcode": {"pattern": r"^\d{4} [A-Z]{2}$"}, "state": False}}},
    ]
}  # fmt: skip
PET: Json = {"oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
             "discriminator": {"propertyName": "type"}}  # fmt: skip
PETS: Json = {"schemas": {"Cat": tagged("cat", lives=INTEGER), "Dog": tagged("dog", tricks=NAMES), "Pet": PET}}

SCHEMAS: dict[str, Json] = {
    # manifests
    "package: name and version": closed("name version", name=PACKAGE_NAME, version=VERSION, private=BOOLEAN),
    "package: author": closed("author", author=PERSON, contributors={"type": "array", "items": PERSON, "maxItems": 2}),
    "package: dependencies": closed("", dependencies=text_map(propertyNames={"pattern": "^[a-z0-9-]{1,10}$"})),
    "package: exports": {"$ref": "#/$defs/e", "$defs": {"e": {"oneOf": [
        STRING, {"type": "null"}, closed("", **{"import": STRING, "default": {"$ref": "#/$defs/e"}})]}}},
    "package: keywords": closed("keywords", keywords=NAMES | {"uniqueItems": True}),
    "package: type": closed("type", type={"enum": ["module", "commonjs"]}, engines=text_map(minProperties=0)),
    "tsconfig": closed("compilerOptions", compilerOptions=closed(
        "", target={"anyOf": [{"enum": ["es5", "es2022"]}, {"pattern": "^[Ee][Ss]\\d{4}$"}]}, strict=BOOLEAN,
        lib={"type": "array", "items": {"enum": ["dom", "es5", "es2022"]}, "uniqueItems": True})),
    "lint rules": closed("rules", rules={"type": "object", "maxProperties": 3, "propertyNames": {"maxLength": 12},
                                         "additionalProperties": {"oneOf": [{"enum": [0, 1, 2]}, {"enum": ["off", "warn"]},
                                                                            {"type": "array", "maxItems": 2, "items": STRING}]}}),
    "python project": closed("name", name=PACKAGE_NAME, license={"oneOf": [closed("file", file=STRING), closed("text", text=STRING)]}),
    "renovate": closed("extends", extends=NAMES | {"minItems": 1}, schedule={"oneOf": [STRING, NAMES]}),
    # workflows
    "workflow: step": STEP,
    "workflow: job": closed("steps", steps={"type": "array", "items": STEP, "minItems": 1, "maxItems": 2}, needs={"oneOf": [STRING, NAMES]}),
    "workflow: on": {"oneOf": [{"enum": ["push", "pull_request"]},
                               {"type": "array", "items": {"enum": ["push", "pull_request"]}, "minItems": 1, "uniqueItems": True},
                               closed("", push=closed("", branches=NAMES), schedule=NAMES)]},
    "workflow: push filters": closed("", branches=NAMES, **{"branches-ignore": NAMES, "paths": NAMES, "paths-ignore": NAMES}) | {
        "allOf": [{"not": {"required": ["branches", "branches-ignore"]}}, {"not": {"required": ["paths", "paths-ignore"]}}]},
    "workflow: permissions": {"oneOf": [{"enum": ["read-all", "write-all"]},
                                        closed("", contents={"enum": ["read", "write"]}, issues={"enum": ["read", "write"]})]},
    "workflow: concurrency": {"oneOf": [STRING, closed("group", group=STRING, **{"cancel-in-progress": {"oneOf": [BOOLEAN, STRING]}})]},
    "workflow: matrix": {"type": "object", "patternProperties": {"^(?:in|ex)clude$": NAMES, "^(?:os|node)$": NAMES},
                         "additionalProperties": False, "maxProperties": 2},
    "action inputs": {"type": "object", "maxProperties": 2, "propertyNames": {"pattern": "^[a-z_][a-z0-9_-]{0,8}$"},
                      "additionalProperties": closed("description", description=STRING, required=BOOLEAN)},
    # containers and infrastructure
    "compose: ports": {"type": "array", "maxItems": 2, "items": {"oneOf": [PORT, {"type": "string", "pattern": r"^\d{1,4}:\d{1,4}$"},
                       closed("target", target=PORT, protocol={"enum": ["tcp", "udp"]})]}},
    "compose: environment": {"oneOf": [text_map(propertyNames={"pattern": "^[A-Z_]{1,8}$"}), NAMES | {"uniqueItems": True}]},
    "compose: build": {"oneOf": [STRING, closed("context", context=STRING, args={"oneOf": [NAMES, text_map()]})]},
    "compose: depends": {"oneOf": [NAMES, {"type": "object", "maxProperties": 2, "additionalProperties": closed(
        "condition", condition={"enum": ["service_started", "service_healthy"]}, restart=BOOLEAN)}]},
    "probe: exactly one kind": closed("", exec=NAMES, httpGet=closed("port", port=PORT), tcpSocket=closed("port", port=PORT)) | {
        "oneOf": [{"required": ["exec"]}, {"required": ["httpGet"]}, {"required": ["tcpSocket"]}]},
    "int or text": closed("maxSurge", maxSurge={"oneOf": [INTEGER, {"type": "string", "pattern": "^[0-9]{1,2}%$"}]}),
    "labels": text_map(propertyNames={"minLength": 1, "maxLength": 10}),
    "volume": closed("name", name=STRING, emptyDir=closed(""), hostPath=closed("path", path=STRING)) | {
        "oneOf": [{"required": ["emptyDir"]}, {"required": ["hostPath"]}]},
    "autoscaler": closed("minReplicas maxReplicas", minReplicas=INTEGER, maxReplicas=INTEGER | {"exclusiveMinimum": 0}),
    "policy statement": closed("Effect", Effect={"enum": ["Allow", "Deny"]}, Action=NAMES, NotAction=NAMES) | {
        "oneOf": [{"required": ["Action"]}, {"required": ["NotAction"]}]},
    "alert rule": closed("expr", expr=STRING, alert=STRING, record=STRING, **{"for": STRING}) | {
        "oneOf": [{"required": ["alert"]}, {"required": ["record"]}], "dependentSchemas": {"for": {"required": ["alert"]}}},
    "int64": closed("id", id={"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    # API objects
    "openapi: pets by reference": {"$ref": "#/components/schemas/Pet", "components": PETS},
    "openapi: page": closed("items total", items={"type": "array", "items": {"$ref": "#/components/schemas/Cat"}, "maxItems": 2},
                            total=INTEGER) | {"components": PETS},
    "openapi: merged": {"allOf": [{"$ref": "#/definitions/base"}], "properties": {"size": INTEGER}, "required": ["size"],
                        "unevaluatedProperties": False, "type": "object",
                        "definitions": {"base": {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]}}},
    "openapi: problem": closed("type status", type={"type": "string", "format": "uri", "maxLength": 30}, status={"type": "integer",
                               "minimum": 400, "maximum": 599}, detail=STRING),
    "openapi: parameter": closed("name in", name=STRING, required=BOOLEAN, **{"in": {"enum": ["path", "query", "header"]}}) | {
        "if": {"properties": {"in": {"const": "path"}}}, "then": {"properties": {"required": {"const": True}}, "required": ["required"]}},
    "openapi: schema or reference": {"oneOf": [closed("$ref", **{"$ref": STRING}), closed("type", type={"enum": ["string", "object"]})]},
    "money": MONEY,
    "payment": closed("method", method={"enum": ["card", "transfer"]}, card={"type": "string", "pattern": r"^\d{16}$"}, iban=STRING) | {
        "if": {"properties": {"method": {"const": "card"}}}, "then": {"required": ["card"]}, "else": {"required": ["iban"]}},
    "address by country": ADDRESS,
    "card needs billing": closed("name", name=STRING, card=INTEGER, billing=STRING) | {"dependentRequired": {"card": ["billing"]}},
    "webhook": {"oneOf": [tagged("created", id=INTEGER), tagged("deleted", id=INTEGER, by=STRING), tagged("ping")]},
    "geojson": {"oneOf": [tagged("Point", coordinates={"$ref": "#/$defs/p"}),
                          tagged("LineString", coordinates={"type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 2, "maxItems": 3})],
                "$defs": {"p": {"type": "array", "items": {"type": "number", "minimum": -180, "maximum": 180}, "minItems": 2, "maxItems": 2}}},
    "json patch": {"type": "array", "maxItems": 2, "items": {"oneOf": [
        closed("op path value", op={"enum": ["add", "replace"]}, path=STRING, value=STRING),
        closed("op path", op={"const": "remove"}, path=STRING), closed("op from path", op={"enum": ["move", "copy"]}, path=STRING, **{"from": STRING})]}},
    "sparse update": closed("", name=STRING, email=STRING) | {"minProperties": 1},
    "rating": closed("stars", stars={"oneOf": [{"const": n, "title": f"{n} stars"} for n in range(1, 6)]}),
    "feature flag": closed("key", key={"type": "string", "not": {"enum": ["", "default"]}, "maxLength": 8},
                           share={"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}),
    # extraction and agents
    "invoice": closed("number lines", number=STRING, date={"type": "string", "format": "date"}, lines={
        "type": "array", "minItems": 1, "maxItems": 2, "items": closed("text price", text=STRING, price=MONEY)}),
    "sentiment": closed("label score", label={"enum": ["good", "bad"]}, score={"type": "number", "minimum": 0, "maximum": 1}),
    "entities": {"type": "array", "maxItems": 2, "items": {"anyOf": [tagged("person", name=STRING), tagged("place", name=STRING, country=STRING)]}},
    "plan of steps": closed("steps", steps={"type": "array", "maxItems": 2, "items": {"oneOf": [
        tagged("search", query=STRING), tagged("open", page=INTEGER), tagged("answer", text=STRING)]}}),
    "quiz": closed("options answer", options={"type": "array", "prefixItems": [{"const": "a"}, {"const": "b"}], "items": False,
                   "minItems": 2, "uniqueItems": True}, answer={"enum": ["a", "b"]}),
    "tree": {"$ref": "#/definitions/node", "definitions": {"node": closed("v", v=INTEGER, l={"oneOf": [{"type": "null"}, {"$ref": "#/definitions/node"}]})}},
    "weekdays": closed("days", days={"type": "array", "items": {"enum": ["mo", "tu", "we", "th", "fr"]}, "uniqueItems": True, "minItems": 1}),
    "draft 7 with nullable": closed("x", x={"type": ["string", "null"], "maxLength": 5}) | {"$schema": DRAFT_7, "title": "N", "default": {}},
    "draft 7 dependencies": closed("", a=INTEGER, b=INTEGER) | {"$schema": DRAFT_7, "dependencies": {"a": ["b"], "b": {"properties": {"b": {"minimum": 5}}}}},
    "phone": closed("phone", phone={"type": "string", "format": "phone", "pattern": r"^\+\d{6}$"}),
    "swagger formats": closed("n", n={"type": "integer", "format": "int32", "minimum": 0, "maximum": 9}),
    "at least one tag": closed("tags", tags=NAMES | {"contains": {"const": "main"}}),
    "locale map": text_map(propertyNames={"pattern": "^[a-z]{2}$"}, patternProperties={"^x": INTEGER}),
    "number or integer": closed("v", v={"oneOf": [{"type": "integer", "maximum": 9}, {"type": "number", "maximum": 9}]}),
}  # fmt: skip

REFUSED = {
    "package: keywords": "properties.keywords.uniqueItems",
    "compose: environment": "oneOf[1].uniqueItems",
    "phone": "properties.phone.format",
    "swagger formats": "properties.n.format",
    "at least one tag": "properties.tags.contains",
    "locale map": "propertyNames",
    "number or integer": "properties.v.oneOf",
}
