"""Tables of measured figures: what a run of ``kamera bench`` is cut down to, and how that is shown.

Each file of ``docs/measured/`` is one suite of one run: what was asked, when, on which machine, with which versions,
and the figures that a document shows. Nothing in ``docs/measured.md`` is typed by hand.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "measured"
HEADLINE = re.compile(r"(<!-- measured:begin -->\n).*?(<!-- measured:end -->)", re.DOTALL)
Json = Mapping[str, Any]

KEPT_OF_MACHINE = ("processor", "gpu", "num_cpus", "num_threads", "python", "versions", "load_average")
KEPT = {
    "memory": ("model", "device", "dtype", "num_episodes", "num_questions", "arms"),
    "fidelity": ("model", "device", "dtype", "num_episodes", "num_questions", "arms", "chunks"),
    "orbit": ("model", "device", "rank", "energy", "of_3", "of_4"),
    "compose": ("model", "device", "dtype", "num_episodes", "num_antecedents", "arms"),
    "slide": ("model", "device", "dtype", "num_episodes", "arms"),
    "deficit": ("model", "device", "dtype", "num_episodes", "num_layers", "layers", "injected", "capture",
                "token_share_for_energy"),
    "ttft": ("geometry", "model", "num_parameters", "device", "dtype", "attention", "headline_chunks",
             "break_even_tokens", "points", "patches"),
    "store": ("arms",),
}  # fmt: skip
"""Suites in the order in which they are shown, and the fields of their JSON that are kept."""
_DROPPED = {
    "kind", "setting", "energy", "times_ms", "cpu_ms", "warm_up_ms", "patch_raw_bytes", "patch_stored_bytes",
    "kl_two_hop_mean", "seconds_per_episode", "compile_measure_ms", "compile_prefill_ms", "cpu_times_ms", "times",
    "chunk_raw_bytes", "question_tokens", "kl_max", "fingerprint",
}  # fmt: skip
"""Fields of any depth that no table shows."""


# Recording


def record(suites: Sequence[str], source: Path | None, options: Sequence[str]) -> None:
    """Keep some suites of a run, made now or found in ``source``.

    Parameters
    ----------
    suites : sequence of str
        Those to keep; none for all of the run.
    source : Path or None
        A ``bench.json``; None to run the suites now, with ``options``.
    """
    if source is not None:
        _keep(source, suites)
        return
    with tempfile.TemporaryDirectory() as folder:
        asked = ["bench", *suites, *options, "--out", folder]
        subprocess.run([sys.executable, "-m", "kamera_cli", *asked], check=True)
        _keep(Path(folder) / "bench.json", suites)


def _keep(source: Path, suites: Sequence[str]) -> None:
    run = json.loads(source.read_text(encoding="utf-8"))
    machine = run["environment"]
    FOLDER.mkdir(exist_ok=True)
    for suite in suites or run["suites"]:
        data = run["suites"][suite]
        kept = {
            "suite": suite,
            "command": command_of(suite, machine["arguments"]),
            **{name: machine[name] for name in ("date", "version", "commit")},
            "seed": run["seed"],
            "environment": {name: machine[name] for name in KEPT_OF_MACHINE},
            "data": _slim({name: data[name] for name in KEPT[suite]}),
        }
        name = suite if data.get("geometry", "tiny") == "tiny" else f"{suite}-{data['geometry']}"
        (FOLDER / f"{name}.json").write_text(_compact(kept), encoding="utf-8")


def command_of(suite: str, arguments: Json) -> str:
    """The command line that measures one suite of a run again; options at their defaults are left out."""
    words = ["kamera bench", suite]
    for name, value in arguments.items():
        if name != "suites" and value not in (None, [], 0, "auto", "kamera-tiny"):
            given = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"--{name} {given}")
    return " ".join(words)


def _compact(value: Json) -> str:
    """JSON with each innermost object or list on a line of its own."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    inner = re.compile(r"([\[{])\s*([^\[\]{}]*?)\s*([\]}])")
    return inner.sub(lambda match: match[1] + re.sub(r"\n\s*", " ", match[2]) + match[3], text) + "\n"


def _slim(value: Any) -> Any:
    """Without the fields that no table shows; five digits are more than any table has."""
    if isinstance(value, dict):
        return {name: _slim(item) for name, item in value.items() if name not in _DROPPED}
    if isinstance(value, list):
        return [_slim(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# Cells


def _share(found: Json | None) -> str:
    """``99.7 % [99.4, 99.8]``."""
    if found is None or found["accuracy"] is None:
        return "–"
    ends = ", ".join(f"{100 * found[end]:.1f}" for end in ("low", "high"))
    return f"{100 * found['accuracy']:.1f} % [{ends}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def _eta(value: float | None) -> str:
    return "–" if value is None else f"{value:.5f}"


def _ms(samples: Json) -> str:
    """``39.7 ms [38.7–59.1]``."""
    middle, low, high = (_time(samples[name]) for name in ("median_ms", "min_ms", "max_ms"))
    return f"{middle} ms [{low}–{high}]"


def _time(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns whose head begins with ``>`` are aligned to the right."""
    heads = [name.removeprefix(">") for name in columns]
    rules = ["--:" if name.startswith(">") else "---" for name in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rules, *rows))


# Suites


def _memory(data: Json) -> list[str]:
    columns = ("arm", ">patch : KV, raw", ">as stored", ">two-hop right", ">one-hop right", ">KL mean", ">KL p95",
               ">KL above 0.05")  # fmt: skip
    rows = [
        (
            name,
            _percent(arm["patch_to_kv_raw_ratio"]),
            _percent(arm["patch_to_kv_stored_ratio"]),
            _share(arm["two_hop"]),
            _share(arm["one_hop"]),
            _number(arm["kl_mean"]),
            _number(arm["kl_p95"]),
            str(arm["num_above_bound"]),
        )
        for name, arm in data["arms"].items()
    ]
    return [
        f"{_asked(data)} Chunks stand in an order other than that of ingest. `auto` is `--rank auto` with that "
        "`--energy`; `auto 0.999, int8` is the default. The last column counts the questions whose KL to re-prefill "
        "is above the bound of `--reuse auto`.",
        table(columns, rows),
    ]


def _fidelity(data: Json) -> list[str]:
    columns = ("arm", ">two-hop right", ">one-hop right", ">KL mean", ">KL p95", ">of blind's KL closed")
    rows = [
        (
            name,
            _share(arm["two_hop"]),
            _share(arm["one_hop"]),
            _number(arm["kl_mean"]),
            _number(arm["kl_p95"]),
            _percent(arm["kl_closed"], 3),
        )
        for name, arm in data["arms"].items()
    ]
    return [
        f"{_asked(data)} Rivals run on the same tokens in the same run; the share behind a rival's name is the part "
        "of the tokens that it computes anew for every prompt. Oracle tokens are those of the largest true Δ. "
        "Patches compute no token anew.",
        table(columns, rows),
    ]


def _orbit(data: Json) -> list[str]:
    columns = ("arm", ">two-hop right", ">KL mean", ">KL p95", ">η", ">patches : KV")
    parts = [
        "Every order of sets of chunks. η = 1 − KL / KL of blind. Bytes: the patches that all orders need, over the "
        "KV that one patch of each set serves.",
    ]
    for size in (3, 4):
        found = data[f"of_{size}"]
        rows = [
            (
                name,
                _share(arm["two_hop"]),
                _number(arm["kl_mean"]),
                _number(arm["kl_p95"]),
                _eta(arm["eta"]),
                _percent(arm["patch_bytes"] / found["kv_bytes"] if arm["patch_bytes"] else None),
            )
            for name, arm in found["arms"].items()
        ]
        count = max(arm["two_hop"]["count"] for arm in found["arms"].values())
        parts += [
            f"{size} chunks, {found['episodes']} episodes, {count} two-hop answers:",
            table(columns, rows),
        ]
    return parts


def _compose(data: Json) -> list[str]:
    numbers = [*map(str, data["num_antecedents"]), "all"]
    columns = ("arm", *(f">{number}" for number in numbers), ">KL mean", ">KL p95", ">η")
    rows = [
        (
            name,
            *(_share(arm[number]["two_hop"]) for number in numbers),
            _number(arm["all"]["kl_mean"]),
            _number(arm["all"]["kl_p95"]),
            _eta(arm["all"]["eta"]),
        )
        for name, arm in data["arms"].items()
    ]
    return [
        f"{data['num_episodes']} episodes, {_model(data)}. Two-hop answers right, by number of antecedents of the last "
        "chunk; every chunk after the second stands on a composed patch at once. KL and η over all questions.",
        table(columns, rows),
    ]


def _slide(data: Json) -> list[str]:
    columns = (
        "arm",
        ">two-hop through the chunk that left",
        ">one-hop in the others",
        ">KL mean",
        ">KL p95",
        ">η",
    )
    rows = [
        (
            name,
            _share(arm["through"]),
            _share(arm["other"]),
            _number(arm["kl"]),
            _number(arm["kl_p95"]),
            _eta(arm["eta"]),
        )
        for name, arm in data["arms"].items()
    ]
    return [
        f"{data['num_episodes']} episodes, {_model(data)}. A chunk leaves the window and comes back. KL is to a "
        "re-prefill of what stands in the window then; arms that keep what the others took in from the chunk that left "
        "are meant to differ from it.",
        table(columns, rows),
    ]


def _deficit(data: Json) -> list[str]:
    closed = {row["cut"]: row for row in data["injected"]}
    rows = [
        (
            str(row["layer"]),
            _percent(row["energy_share"], 0),
            _percent(closed.get(row["layer"], {}).get("closed_below"), 0),
            _percent(closed.get(row["layer"], {}).get("closed_from"), 0),
        )
        for row in data["layers"]
    ]
    captured = [
        (name, _number(arm["kl_mean"]), _percent(arm["closed"], 2)) for name, arm in data["capture"].items()
    ]
    tokens = data["token_share_for_energy"]
    return [
        f"{data['num_episodes']} episodes, {_model(data)}. The re-prefill's own KV in some layers, canonical KV in the "
        f"others. Nine tenths of ‖Δ‖² lie in {_percent(tokens['90%'], 0)} of a chunk's tokens.",
        table((">layer", ">share of ‖Δ‖²", ">KL closed by Δ below it", ">by Δ from it on"), rows),
        "Canonical KV captured behind the preamble, and bare:",
        table(("arm", ">KL mean", ">KL closed"), captured),
    ]


def _ttft(data: Json) -> list[str]:
    labels = {"full": "full re-encode", "reprefill": "re-prefill", "patched": "patched", "blind": "blind"}
    columns = (
        ">chunks",
        ">tokens",
        *(f">{label}" for label in labels.values()),
        ">full : patched",
        ">by CPU time",
    )
    rows = [
        (
            str(point["num_chunks"]),
            f"{point['num_tokens']:,}",
            *(_ms(point["ttft"][arm]) for arm in labels),
            f"{point['ratio_to_full']['patched']:.1f}",
            "–"
            if point["cpu_ratio_to_full"]["patched"] is None
            else f"{point['cpu_ratio_to_full']['patched']:.1f}",
        )
        for point in data["points"]
    ]
    main = headline_point(data)
    stages = main["stages_ms"]["patched"]
    paid = [
        (
            str(one["num_chunks"]),
            _spread(one["form_ratio"]),
            _spread(one["break_even_reuses"]["reprefill"]),
            _spread(one["break_even_reuses"]["full"]),
        )
        for one in data["patches"]["payback"]
    ]
    return [
        f"{_model(data)}, {data['num_parameters'] / 1e6:.1f} M parameters, {data['attention']}. From the request in "
        "hand to the first token id on the host; model loaded, page cache warm, arms in turn; median [min–max]. "
        f"Decoding the file again ({main['decode_ms']:.0f} ms at {main['num_chunks']} chunks) is not counted. "
        "`full re-encode` runs the vision tower and the prefill, as a prefix cache has to after a reorder; "
        "`re-prefill` starts from stored embeddings. The last column is the ratio of processor times, which other work "
        "on the machine hardly stretches.",
        table(columns, rows),
        f"Stages of patched reuse at {main['num_chunks']} chunks, medians: "
        + ", ".join(f"{name} {value:.1f} ms" for name, value in stages.items()) + ".",
        "What forming patches costs, in plain prefills of the same tokens, and after how many uses compiling ahead has "
        "paid, all costs counted; median [min–max]:",
        table((">chunks", ">forming, in prefills", ">uses against re-prefill", ">against re-encode"), paid),
    ]  # fmt: skip


def _spread(values: Sequence[float | None]) -> str:
    """``1.31 [1.28–1.32]``; a run in which it never paid counts as the largest value."""
    ordered = sorted(math.inf if value is None else value for value in values)
    shown = ["never" if value == math.inf else f"{value:.2f}" for value in ordered]
    return f"{shown[len(shown) // 2]} [{shown[0]}–{shown[-1]}]"


def headline_point(data: Json) -> Json:
    """The prompt that stages and headline are about."""
    return next(point for point in data["points"] if point["num_chunks"] == data["headline_chunks"])


def _store(data: Json) -> list[str]:
    rows = [
        (
            arm["dtype"],
            arm["codec"],
            f"{arm['ratio']:.2f}",
            *(f"{arm[way]['bytes_per_s'] / 2**20:.0f} MiB/s" for way in ("write", "read")),
        )
        for arm in data["arms"]
    ]
    return [
        "Real KV of `kamera-tiny`. Speeds count raw bytes. Writes end on the disk, one synchronous transaction per "
        "record; reads come from the page cache and are checked.",
        table(("dtype", "stored as", ">raw : stored", ">write", ">read"), rows),
    ]


def _model(data: Json) -> str:
    return ", ".join(str(data[name]) for name in ("model", "device", "dtype") if data.get(name))


def _asked(data: Json) -> str:
    kinds = {"two_hop": "two-hop", "one_hop": "one-hop", "unknown": "unanswerable"}
    counts = ", ".join(f"{data['num_questions'][name]} {label}" for name, label in kinds.items())
    return f"{data['num_episodes']} episodes, {_model(data)}: {counts} questions."


SHOWN: dict[str, tuple[str, Callable[[Json], list[str]]]] = {
    "memory": ("Bytes of patches and what they restore", _memory),
    "fidelity": ("Ranks, and other methods on the same tokens", _fidelity),
    "orbit": ("Every order of a set", _orbit),
    "compose": ("Patches composed from pairs", _compose),
    "slide": ("A chunk leaves and comes back", _slide),
    "deficit": ("Where Δ lies", _deficit),
    "ttft": ("Time to first token", _ttft),
    "store": ("The store", _store),
}


# Pages


def runs() -> dict[str, Json]:
    """What was recorded, by file name, in the order in which it is shown."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}
    order = list(SHOWN)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[1]["suite"]), item[0])))


PREFACE = """# Measured

Made by `python docs/generate.py measured` from the runs in `docs/measured/`; no figure is typed by hand. Each
section says how its run was started; the same command measures again on your machine. Shares are exact matches of
greedy answers with Wilson 95 % intervals. KL is of the next token, in nats, to a re-prefill of the same prompt in the
same run. `re-prefill` is the model's own prefill of the whole prompt, `blind` is reuse without patches.

Read these figures for what they are: `kamera-tiny` is small, ours, and trained on the task that it is asked about. They
show that the mechanism works. They do not say how a pretrained model of some billion parameters behaves, and none of
them may be set beside the paper's. Nothing here was run on a GPU unless the section says so. Times were taken on a
shared machine; the load average at the end of each run stands beside them.
"""


def page() -> str:
    """All of ``docs/measured.md``."""
    parts = [PREFACE]
    for name, run in runs().items():
        title, show = SHOWN[run["suite"]]
        suffix = name.removeprefix(run["suite"]).replace("-", ", model of shape ")
        parts += [f"## {title}{suffix}", _wrapped(_provenance(run)), *map(_wrapped, show(run["data"]))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _wrapped(part: str) -> str:
    """Prose in lines of a readable length; tables as they are."""
    return (
        part
        if part.startswith("|")
        else textwrap.fill(part, 116, break_long_words=False, break_on_hyphens=False)
    )


def _provenance(run: Json) -> str:
    machine = run["environment"]
    program = f"kamera {run['version']} ({(run['commit'] or 'no checkout')[:10]})"
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers"))
    load = ", ".join(f"{value:.1f}" for value in machine["load_average"] or ()) or "unknown"
    return (
        f"`{run['command']}` on {run['date'][:10]}, {program}, seed {run['seed']}. "
        f"{machine['gpu'] or machine['processor']}, {machine['num_threads']} of {machine['num_cpus']} CPUs, "
        f"Python {machine['python']}, {versions}; load average {load}."
    )


def headline() -> str:
    """The table at the top of the README; without times where none were recorded."""
    found = runs()
    memory, ttft = found["memory"]["data"], found.get("ttft")
    default = memory["arms"]["auto 0.999, int8"]
    size = _percent(default["patch_to_kv_raw_ratio"], 1)
    rows = {
        "full": ("re-encode and prefill, as after a prefix-cache miss", memory["arms"]["re-prefill"]),
        "patched": (f"**kamera, patched** ({size} of the KV's bytes)", default),
        "blind": ("blind reuse: moved, not patched", memory["arms"]["blind"]),
    }
    cells = {
        way: [
            label,
            *(_percent(arm[group]["accuracy"], 1) for group in ("two_hop", "one_hop")),
            _number(arm["kl_mean"]),
        ]
        for way, (label, arm) in rows.items()
    }
    columns = ["chunks in another order", ">two-hop right", ">one-hop right", ">mean KL"]
    counts = memory["num_questions"]
    told = (
        f"`{memory['model']}`, {memory['device']}, {memory['dtype']}, {found['memory']['date'][:10]}: "
        f"{counts['two_hop']} two-hop and {counts['one_hop']} one-hop questions"
    )
    if ttft is not None:
        point = headline_point(ttft["data"])
        columns.append(">first token")
        for way, row in cells.items():
            faster = "" if way == "full" else f" ({point['ratio_to_full'][way]:.1f}×)"
            row.append(f"{point['ttft'][way]['median_ms']:.0f} ms{faster}")
        threads = ttft["environment"]["num_threads"]
        told += f"; first token over {point['num_visual_tokens']:,} visual tokens, {threads} thread"
    told += ". All figures, how each was taken and on what: [docs/measured.md](docs/measured.md)."
    return f"{table(columns, cells.values())}\n\n{_wrapped(told)}\n"


def with_headline(text: str) -> str:
    """A document with the table between its markers as the recorded runs give it."""
    return HEADLINE.sub(lambda match: f"{match[1]}\n{headline()}\n{match[2]}", text)
