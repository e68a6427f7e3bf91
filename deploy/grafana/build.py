"""Writes dashboards/octavo.json from the table below: `python deploy/grafana/build.py`.

A panel is a title, a unit of Grafana, and (legend, PromQL) pairs. Gateways count what callers see, workers what the
engine does; every expression sums over the instances that are chosen at the top of the page.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

TARGET = Path(__file__).resolve().parent / "dashboards" / "octavo.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
W = '{instance=~"$worker"}'
G = '{instance=~"$gateway"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


def quantiles(name: str, selector: str) -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99 of a histogram."""
    return tuple((f"p{int(q * 100)}", quantile(q, name, selector)) for q in (0.5, 0.9, 0.99))


def quantile(q: float, name: str, selector: str) -> str:
    """One of them."""
    return f"histogram_quantile({q}, sum by (le) (rate({name}_bucket{selector}[$__rate_interval])))"


def rate(name: str, selector: str, *, by: str = "") -> str:
    """Per second, summed over instances."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{selector}[$__rate_interval]))"


ROWS = (
    Row(
        title="What callers see",
        panels=(
            Panel(title="Time to first token", unit="s", queries=quantiles("octavo_time_to_first_token_seconds", G)),
            Panel(title="Time per token", unit="s", queries=quantiles("octavo_inter_token_latency_seconds", G)),
            Panel(title="Time of a request", unit="s", queries=quantiles("octavo_e2e_request_latency_seconds", G)),
            Panel(
                title="Requests by status",
                unit="reqps",
                queries=(("{{code}} {{reason}}", rate("octavo_requests_total", G, by="code, reason") + " > 0"),),
                about="reason is Octavo's own; empty where the status comes from the gRPC library.",
            ),
            Panel(
                title="Outputs by reason",
                unit="reqps",
                queries=(("{{finished_reason}}", rate("octavo_request_success_total", G, by="finished_reason")),),
            ),
            Panel(
                title="Requests in flight",
                unit="short",
                queries=(("{{state}}", f"sum by (state) (octavo_gateway_requests{G})"),),
            ),
        ),
    ),
    Row(
        title="Engine",
        panels=(
            Panel(
                title="Tokens",
                unit="short",
                queries=(
                    ("generated/s", rate("octavo_generation_tokens_total", W)),
                    ("prefilled/s", rate("octavo_prefill_tokens_total", W)),
                ),
            ),
            Panel(
                title="Requests",
                unit="short",
                queries=(
                    ("running", f"sum (octavo_num_requests_running{W})"),
                    ("waiting", f"sum (octavo_num_requests_waiting{W})"),
                    ("paused", f"sum (octavo_num_requests_paused{W})"),
                ),
            ),
            Panel(title="Engine step", unit="s", queries=quantiles("octavo_step_time_seconds", W)),
            Panel(title="Host work of a step", unit="s", queries=quantiles("octavo_step_host_time_seconds", W)),
            Panel(title="Tokens of a step", unit="short", queries=quantiles("octavo_iteration_tokens", W)),
            Panel(
                title="Where a request's time goes (mean)",
                unit="s",
                queries=tuple(
                    (
                        part,
                        f"{rate(f'octavo_request_{part}_time_seconds_sum', W)} / "
                        f"{rate(f'octavo_request_{part}_time_seconds_count', W)}",
                    )
                    for part in ("queue", "prefill", "decode", "inference")
                ),
            ),
        ),
    ),
    Row(
        title="What requests are like",
        panels=(
            Panel(
                title="Tokens of a request (p90)",
                unit="short",
                queries=(
                    ("prompt", quantile(0.9, "octavo_request_prompt_tokens", G)),
                    ("generated, of an output", quantile(0.9, "octavo_request_generation_tokens", G)),
                    ("generated, of its longest output", quantile(0.9, "octavo_request_max_num_generation_tokens", G)),
                    ("max_tokens asked for", quantile(0.9, "octavo_request_params_max_tokens", G)),
                ),
            ),
            Panel(
                title="Outputs of a request (mean)",
                unit="short",
                queries=(
                    (
                        "n",
                        f"{rate('octavo_request_params_n_sum', G)} / {rate('octavo_request_params_n_count', G)}",
                    ),
                ),
            ),
            Panel(
                title="Time per output token, means of outputs",
                unit="s",
                queries=quantiles("octavo_request_time_per_output_token_seconds", W),
                about="At the worker. What callers see, with pauses and rounds of messages, is the time per token.",
            ),
        ),
    ),
    Row(
        title="Constrained outputs",
        panels=(
            Panel(title="Masks of a step", unit="s", queries=quantiles("octavo_grammar_mask_seconds", W)),
            Panel(title="Compiling a grammar", unit="s", queries=quantiles("octavo_grammar_compile_seconds", W)),
            Panel(
                title="Grammars",
                unit="reqps",
                queries=(
                    ("found compiled", rate("octavo_grammar_cache_hits_total", W)),
                    ("compiled", rate("octavo_grammar_cache_misses_total", W)),
                    ("failed: {{reason}}", rate("octavo_grammar_failures_total", W, by="reason")),
                ),
            ),
        ),
    ),
    Row(
        title="Paged memory",
        panels=(
            Panel(
                title="KV blocks",
                unit="short",
                queries=(("{{state}}", f"sum by (state) (octavo_kv_blocks{W})"),),
            ),
            Panel(
                title="KV blocks in use",
                unit="percentunit",
                queries=(("{{instance}}", f"octavo_kv_cache_usage_ratio{W}"),),
            ),
            Panel(
                title="Prompt tokens found in the prefix cache",
                unit="percentunit",
                queries=(
                    (
                        "hit ratio",
                        f"{rate('octavo_prefix_cache_hits_total', W)} / {rate('octavo_prefix_cache_queries_total', W)}",
                    ),
                ),
            ),
            Panel(
                title="KV blocks in host memory",
                unit="short",
                queries=(("{{state}}", f"sum by (state) (octavo_kv_host_blocks{W})"),),
                about="The second tier; all 0 where --host-kv-gib is 0.",
            ),
            Panel(
                title="KV blocks copied between the tiers",
                unit="short",
                queries=(("{{direction}}", rate("octavo_kv_copied_blocks_total", W, by="direction")),),
                about="Per second. out: to host memory.",
            ),
            Panel(
                title="Host memory taken for KV blocks",
                unit="bytes",
                queries=(("{{kind}}", f"sum by (kind) (octavo_kv_host_memory_bytes{W})"),),
            ),
            Panel(
                title="Preemptions",
                unit="reqps",
                queries=(("{{kind}}", rate("octavo_num_preemptions_total", W, by="kind")),),
                about="swap: to host memory and back. recompute: from the prompt, as far as the prefix cache lacks it.",
            ),
            Panel(
                title="Pauses for slow readers",
                unit="reqps",
                queries=(("at workers", rate("octavo_request_pauses_total", W)),),
            ),
            Panel(
                title="Blocks leaked, audit violations",
                unit="short",
                queries=(
                    ("leaked", f"sum (octavo_kv_blocks_leaked{W})"),
                    ("violations", f"sum (octavo_kv_audit_violations{W})"),
                ),
                about="Anything but 0 is a defect.",
            ),
        ),
    ),
    Row(
        title="Other gateways of the service",
        panels=(
            Panel(
                title="Other gateways that are reached",
                unit="short",
                queries=(
                    ("{{instance}} reaches", f"octavo_gateway_peers{G} - octavo_gateway_peers_unreachable{G}"),
                    ("{{instance}} does not reach", f"octavo_gateway_peers_unreachable{G}"),
                ),
                about="Aborts, drains and limits leave out what one that is not reached has. 0: there is one gateway.",
            ),
            Panel(
                title="Age of what other gateways told",
                unit="s",
                queries=(("{{instance}}", f"octavo_gateway_peer_news_age_seconds{G}"),),
                about="Of their use of limits; the oldest. Half a second is usual, and after five it counts no longer.",
            ),
            Panel(
                title="Lost between gateways",
                unit="short",
                queries=(("{{lost}}", rate("octavo_gateway_peer_losses_total", G, by="lost")),),
                about="Per second. gateway: one fell silent. message: could not be sent to one. answer: to a Cancel, "
                "an Abort, a Drain or a look at the load.",
            ),
        ),
    ),
    Row(
        title="Processes",
        panels=(
            Panel(title="Workers up", unit="short", queries=(("{{worker_id}}", f"octavo_worker_up{G}"),)),
            Panel(
                title="Age of the last heartbeat",
                unit="s",
                queries=(("{{worker_id}}", f"octavo_worker_heartbeat_age_seconds{G}"),),
            ),
            Panel(
                title="Gateway event loop lag",
                unit="s",
                queries=(
                    *quantiles("octavo_gateway_event_loop_lag_seconds", G),
                    ("tokens go out every", f"max (octavo_gateway_token_interval_seconds{G})"),
                ),
                about="A busy gateway sends more tokens a message, in rounds of up to 8 ms; 0: as they come.",
            ),
            Panel(
                title="ZeroMQ at the workers",
                unit="Bps",
                queries=(("{{direction}}", rate("octavo_zmq_bytes_total", W, by="direction")),),
            ),
            Panel(
                title="Dropped",
                unit="short",
                queries=(
                    ("frames that are not ours", rate("octavo_gateway_zmq_undecodable_frames_total", G)),
                    ("of an epoch given up", rate("octavo_gateway_stale_messages_total", G)),
                    ("gaps", rate("octavo_gateway_sequence_gaps_total", G)),
                ),
            ),
            Panel(
                title="Workers lost, outputs that moved",
                unit="short",
                queries=(
                    ("{{reason}}", rate("octavo_gateway_workers_lost_total", G, by="reason")),
                    ("outputs moved", rate("octavo_requests_migrated_total", G)),
                ),
                about="Per second. An output whose worker is lost goes on at another one.",
            ),
            Panel(
                title="Why a worker was chosen",
                unit="reqps",
                queries=(("{{reason}}", rate("octavo_gateway_routed_requests_total", G, by="reason")),),
            ),
            Panel(
                title="Connections, watchers of the load",
                unit="short",
                queries=(
                    ("connections", f"sum (octavo_gateway_connections{G})"),
                    ("WatchLoad and pages", f"sum (octavo_gateway_load_watchers{G})"),
                ),
                about="A gateway takes octavo_gateway_max_connections of the former and 32 of the latter.",
            ),
            Panel(
                title="Spans of traces",
                unit="short",
                queries=(("{{outcome}}", rate("octavo_gateway_trace_spans_total", G, by="outcome")),),
                about="Per second. dropped: the collector is slow or gone; no request waits for it. 0 without traces.",
            ),
        ),
    ),
)


def dashboard() -> dict[str, object]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": "octavo",
        "title": "Octavo",
        "tags": ["octavo"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                _variable("gateway", "octavo_gateway_draining"),
                _variable("worker", "octavo_num_requests_running"),
            ]
        },
        "panels": _panels(),
    }


def _variable(name: str, metric: str) -> dict[str, object]:
    query = f"label_values({metric}, instance)"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> list[dict[str, object]]:
    panels: list[dict[str, object]] = []
    y = 0
    for row in ROWS:
        place = {"h": 1, "w": WIDTH * COLUMNS, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": place, "panels": []})
        y += 1
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, COLUMNS)
            place = {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": y + line * HEIGHT}
            panels.append(_panel(panel, number=len(panels) + 1, place=place))
        y += -(-len(row.panels) // COLUMNS) * HEIGHT
    return panels


def _panel(panel: Panel, *, number: int, place: dict[str, int]) -> dict[str, object]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for index, (legend, expression) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
