"""What all suites share: a scratch engine, card episodes with progress, arms that collect answers, and what a run says
of itself, so that its figures can be cited."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

import kamera_cli
from kamera_cli.bench import SUITES, BenchOptions
from kamera_cli.bench.episodes import Asked, Encoded, encoded_episodes
from kamera_cli.bench.figures import Arm, BenchResult, Mark, SuiteResult
from kamera_cli.bench.report import write
from kamera_cli.engine import Engine
from kamera_cli.errors import UsageError
from kamera_cli.model.compat import DynamicCache
from kamera_cli.model.generate import next_token_kl
from kamera_cli.model.runner import ModelRunner
from kamera_cli.model.scoring import is_greedy_match, score
from kamera_cli.results import Progress
from kamera_cli.settings import Settings

_PACKAGES = ("torch", "transformers", "av", "lmdb", "zstandard", "numpy", "pillow")
_T = TypeVar("_T")


@dataclass
class Run:
    """One suite at work.

    Attributes
    ----------
    engine : Engine
        The model of the settings over a fresh store without a quota.
    work : Path
        Folder for files beside that store; both are gone when the run ends.
    num_episodes : int
        Of those that `counted` went through, together.
    seconds : float
        That it took.
    """

    options: BenchOptions
    on_progress: Callable[[Progress], None]
    engine: Engine
    work: Path
    num_episodes: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    def counted(self, doing: str, count: int, episodes: Iterable[_T]) -> Iterator[_T]:
        """Episodes one by one, with progress and clock."""
        started = time.perf_counter()
        for done, episode in enumerate(episodes):
            self.on_progress(Progress(doing, done, count, "episodes"))
            yield episode
        self.on_progress(Progress(doing, count, count, "episodes"))
        self.num_episodes += count
        self.seconds += time.perf_counter() - started

    def episodes(self, doing: str, default: int) -> Iterator[Encoded]:
        """Card episodes of the run's seed, as many as were asked for."""
        return self.sized_episodes(doing, self.options.episodes or default, None)

    def sized_episodes(self, doing: str, count: int, num_chunks: int | None) -> Iterator[Encoded]:
        """The first ``count`` card episodes of so many chunks; see `encoded_episodes`."""
        runner, seed = self.engine.runner, self.options.seed
        found = encoded_episodes(runner, count, seed, self.work, num_chunks=num_chunks)
        return self.counted(doing, count, found)

    def described(self) -> dict[str, Any]:
        """Model, machine's device and, once there were any, episodes: goes into the data as it is."""
        context, runner = self.engine.context, self.engine.runner
        found: dict[str, Any] = {
            "model": context.checkpoint.label,
            "fingerprint": context.fingerprint,
            "device": str(runner.device),
            "dtype": context.dtype_name,
            "attention": runner.loaded.attention,
        }
        if self.num_episodes:
            found |= {
                "num_episodes": self.num_episodes,
                "seconds_per_episode": self.seconds / self.num_episodes,
            }
        return found


@dataclass(frozen=True)
class Task:
    """What a suite is handed: ``measure(task)`` of its module gives a `SuiteResult`.

    Attributes
    ----------
    settings : Settings
        Model, device, dtype and attention; the store of the settings is not touched.
    """

    settings: Settings
    options: BenchOptions
    on_progress: Callable[[Progress], None] = lambda _step: None

    @contextmanager
    def run(
        self, *, folder: Path | None = None, model: str | None = None, shows_jobs: bool = True
    ) -> Iterator[Run]:
        """A run over a store that is thrown away.

        Parameters
        ----------
        folder : Path or None
            Where the run's own folder is made: the system's place for temporary files, or the disk that is measured.
        model : str or None
            Another model than that of the settings.
        shows_jobs : bool
            Whether the engine's own jobs report their progress too.
        """
        with tempfile.TemporaryDirectory(prefix="kamera-bench-", dir=folder) as made:
            own = replace(
                self.settings,
                store=Path(made) / "store",
                quota_bytes=None,
                rehash=False,
                model=model or self.settings.model,
            )
            with Engine(own, on_progress=self.on_progress if shows_jobs else None) as engine:
                yield Run(self.options, self.on_progress, engine, Path(made))


def answer(
    runner: ModelRunner,
    arms: dict[str, Arm],
    caches: Mapping[str, DynamicCache],
    end: int,
    asked: Sequence[Asked],
    *,
    num_antecedents: int = 0,
) -> None:
    """Ask questions over caches of one context and mark each arm's answers; KL is taken to the first cache.

    All questions are scored in one forward per arm with the answer fed in, which is right exactly when greedy decoding
    gives the answer and ends.

    Parameters
    ----------
    arms : dict of str to Arm
        By name; one that is missing is added.
    caches : mapping of str to DynamicCache
        By name of the arm.
    end : int
        Position at which a question starts.
    """
    prompts = [prompt for _, prompt in asked]
    scored = score(runner, list(caches.values()), end, prompts)
    for name, answers in zip(caches, scored, strict=True):
        arms.setdefault(name, Arm(name)).marks += [
            Mark(
                group,
                is_greedy_match(logits, prompt.answer_ids, runner.eos_ids),
                next_token_kl(expected[0], logits[0]),
                num_antecedents,
            )
            for (group, prompt), expected, logits in zip(asked, scored[0], answers, strict=True)
        ]


def run(
    suites: Sequence[str],
    settings: Settings,
    options: BenchOptions,
    on_progress: Callable[[Progress], None] | None = None,
) -> BenchResult:
    """Run suites and write JSON, pictures and the report into ``options.out``.

    The store of the settings is not touched: each suite works in a temporary one.

    Parameters
    ----------
    suites : sequence of str
        Names from `SUITES`.
    settings : Settings
        Model, device, dtype and attention.

    Raises
    ------
    UsageError
        Unknown suite, or a folder that cannot be written.
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise UsageError(f"no suite {unknown[0]!r} (suites: {', '.join(SUITES)})")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror or error}") from error
    started = time.perf_counter()
    task = Task(settings, options, on_progress or (lambda _step: None))
    results: list[SuiteResult] = []
    for name in suites:
        suite = importlib.import_module(f"kamera_cli.bench.{name}")
        results.append(suite.measure(task))
    result = BenchResult(
        suites=tuple(results),
        environment=environment() | {"arguments": _arguments(suites, settings, options)},
        seed=options.seed,
        total_s=time.perf_counter() - started,
    )
    return write(result, options.out)


def environment() -> dict[str, Any]:
    """Program, machine and versions of a run; ``load_average`` tells how busy the machine was."""
    return {
        "version": kamera_cli.__version__,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in _PACKAGES},
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _arguments(suites: Sequence[str], settings: Settings, options: BenchOptions) -> dict[str, Any]:
    """What was asked for: the suites, their options, and what of the settings decides the figures."""
    asked = asdict(options)
    del asked["out"]
    names = ("model", "device", "dtype", "attention")
    return {"suites": list(suites), **asked, **{name: getattr(settings, name) for name in names}}


def _commit() -> str | None:
    """Commit of the checkout that runs, ``-dirty`` behind it where files were changed; None where it is no checkout."""
    root = Path(kamera_cli.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
