"""The check of `octavo doctor` for --tensor-parallel-size: are there devices for the ranks, can they reach each other,
and how fast do they add?"""

from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools.doctor_checks import Finding, Verdict
from octavo.wire.host import usable_cores

NAME = "ranks"
SLOW_SUM_S = 0.002
"""A model of 64 layers adds 129 times a step: a quarter of a second."""


def check_ranks(settings: ServeSettings) -> list[Finding]:
    """Empty if a worker has one rank."""
    size = settings.tensor_parallel_size
    if size == 1:
        return []
    try:
        import torch

        from octavo.worker.loading.rank_probe import NUM_TOKENS, RanksApart, probe_ranks
    except ImportError as error:
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=str(error), advice="install torch first")]
    wants_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())
    num_places = torch.cuda.device_count() if wants_gpu else usable_cores()
    if wants_gpu and num_places < size:
        detail = f"{size} ranks need a CUDA device each, and there are {num_places or 'none'}"
        fewer = f"--tensor-parallel-size {num_places} or less, or " if num_places else ""
        advice = f"{fewer}--device cpu"
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=detail, advice=advice)]
    try:
        found = probe_ranks(size, device="cuda" if wants_gpu else "cpu")
    except RanksApart as error:
        advice = (
            "look at NCCL_DEBUG=INFO, and at what keeps devices from each other (containers, IOMMU)"
            if wants_gpu
            else "the loopback interface must be up and named by GLOO_SOCKET_IFNAME (lo)"
        )
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=str(error), advice=advice)]
    detail = (
        f"{size} reach each other over {found.transport}: a sum takes {found.token_s * 1e6:,.0f} µs for one token, "
        f"{found.prompt_s * 1e3:,.2f} ms for {NUM_TOKENS} ({found.bytes_per_s / 1e9:.2f} GB/s)"
    )
    if not wants_gpu and num_places < size:
        advice = f"{size} ranks share {num_places} cores: fewer ranks are faster"
        return [Finding(name=NAME, verdict=Verdict.WARNING, detail=detail, advice=advice)]
    if found.token_s > SLOW_SUM_S:
        advice = "that is slow: other programs may keep the machine busy"
        return [Finding(name=NAME, verdict=Verdict.WARNING, detail=detail, advice=advice)]
    return [Finding(name=NAME, verdict=Verdict.GOOD, detail=detail)]
