"""The words of a strategy."""

from types import MappingProxyType

# Each word with an example; a word whose example has a colon takes arguments.
SYNCS = MappingProxyType(
    {
        "every-step": "every-step",
        "backup": "backup:1",
        "bounded": "bounded:2",
        "server": "server",
        "server-async": "server-async",
        "hogwild": "hogwild",
        "local": "local:8",
        "diloco": "diloco:50",
        "pipedream": "pipedream",
        "federated": "federated:10",
    }
)
CODECS = MappingProxyType(
    {
        "fp32": "fp32",
        "bf16": "bf16",
        "int8": "int8",
        "int4": "int4",
        "topk": "topk:0.01",
        "low-rank": "low-rank:4",
        "sign": "sign",
        "lossless": "lossless",
    }
)
ROUTES = MappingProxyType(
    {
        "auto": "auto",
        "native": "native",
        "ring": "ring",
        "tree": "tree",
        "hypercube": "hypercube",
        "hierarchical": "hierarchical",
        "grid": "grid",
        "shared-memory": "shared-memory",
        "server": "server",
    }
)


SCHEDULES = MappingProxyType(
    {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved:2", "zero-bubble": "zero-bubble"}
)
