"""Which right each method asks for. A method that stands in no row is refused to everybody once there are keys.

Must not know callers.
"""

from enum import StrEnum


class Scope(StrEnum):
    """What a caller may do."""

    GENERATE = "generate"  # generate, tokenize, end one's own requests
    MODELS = "models"  # what is served, its limits, its tokenizer
    HEALTH = "health"
    REFLECTION = "reflection"
    ADMIN = "admin"  # what touches everybody: abort, audit, flush, drain, events of the prefix cache


_SERVICES: dict[str, dict[str, Scope]] = {
    "octavo.v1.InferenceService": {
        "Generate": Scope.GENERATE,
        "Complete": Scope.GENERATE,
        "Embed": Scope.GENERATE,
        "Tokenize": Scope.GENERATE,
        "Detokenize": Scope.GENERATE,
        "Cancel": Scope.GENERATE,  # of one's own tenant only: the key of a request has the tenant in it
    },
    "octavo.v1.ModelService": {"ListModels": Scope.MODELS, "GetModel": Scope.MODELS},
    "octavo.v1.AdminService": {
        "Abort": Scope.ADMIN,
        "GetLoad": Scope.ADMIN,
        "AuditBlocks": Scope.ADMIN,
        "FlushPrefixCache": Scope.ADMIN,
        "Drain": Scope.ADMIN,
    },
    "grpc.health.v1.Health": {"Check": Scope.HEALTH, "List": Scope.HEALTH, "Watch": Scope.HEALTH},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": Scope.REFLECTION},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Scope.REFLECTION},
    "vllm.grpc.engine.VllmEngine": {
        "Generate": Scope.GENERATE,
        "Embed": Scope.GENERATE,
        "Abort": Scope.GENERATE,  # likewise
        "HealthCheck": Scope.HEALTH,
        "GetModelInfo": Scope.MODELS,
        "GetServerInfo": Scope.MODELS,
        "GetLoads": Scope.MODELS,
        "GetTokenizer": Scope.MODELS,
        "FlushCache": Scope.ADMIN,
        "SubscribeKvEvents": Scope.ADMIN,  # tells the tokens of every tenant's prompts
        "StartProfile": Scope.ADMIN,
        "StopProfile": Scope.ADMIN,
    },
    "inference.GRPCInferenceService": {
        "ServerLive": Scope.HEALTH,
        "ServerReady": Scope.HEALTH,
        "ModelReady": Scope.HEALTH,
        "ServerMetadata": Scope.MODELS,
        "ModelMetadata": Scope.MODELS,
        "ModelConfig": Scope.MODELS,
        "ModelInfer": Scope.GENERATE,
        "ModelStreamInfer": Scope.GENERATE,
    },
}

SCOPE_OF: dict[str, Scope] = {
    f"/{service}/{method}": scope for service, methods in _SERVICES.items() for method, scope in methods.items()
}
"""By the full name of the method, as it stands in the path of the call."""

NOT_ADMIN = frozenset(Scope) - {Scope.ADMIN}
