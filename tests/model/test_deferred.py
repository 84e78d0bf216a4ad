"""The program loads a model without the compiler of torch and without torchvision; both work when asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

BODY = """
import sys
from kamera_cli.model import deferred
deferred.install()
import kamera_cli.model.runner, kamera_cli.model.loading, kamera_cli.query.answer
from kamera_cli.model.checkpoint import open_checkpoint
loaded = kamera_cli.model.loading.load(
    open_checkpoint("kamera-tiny"), device="cpu", dtype="auto", attention="auto", trust_remote_code=False
)
kamera_cli.model.runner.ModelRunner(loaded)
unused = {"torch._dynamo.symbolic_convert", "torch._inductor", "torchvision.models", "torchvision.ops.poolers", "av"}
print("loaded", sorted(unused & set(sys.modules)))
"""
AFTERWARDS = """
from torch._dynamo.guards import GuardBuilder
import torch, torchvision, transformers
from torchvision.transforms import v2
print("same", torch._dynamo.guards.GuardBuilder is GuardBuilder is sys.modules["torch._dynamo.guards"].GuardBuilder)
doubled = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
print("compiled", doubled(torch.ones(2)).tolist())
boxes = torch.tensor([[0.0, 0, 1, 1], [0, 0, 1, 1]])
print("kept", torchvision.ops.nms(boxes, torch.tensor([0.5, 0.9]), 0.5).tolist())
print("resized", tuple(v2.Resize(4)(torch.zeros(3, 8, 8)).shape))
print("named", transformers.models.llama.LlamaConfig().model_type, hasattr(transformers.models, "no_such_model"))
from transformers.integrations import deepgemm
print("marked", getattr(deepgemm.is_deepgemm_loadable, "_dynamo_marked_constant", None))
print("told apart", hasattr(torch._dynamo, "no_such_name"), hasattr(torchvision, "no_such_name"))
"""


def printed(code: str) -> dict[str, str]:
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    return {line.split()[0]: line for line in ran.stdout.splitlines() if line}


@pytest.fixture(scope="module")
def lines() -> dict[str, str]:
    return printed(BODY + AFTERWARDS)


def test_importing_the_package_leaves_the_imports_of_its_host_alone():
    code = """
import sys
import kamera_cli, kamera_cli.app, kamera_cli.model.loading, kamera_cli.model.runner, kamera_cli.model.deferred
own = [finder for finder in sys.meta_path if type(finder).__module__.startswith("kamera")]
print("found", own, "torchvision.transforms" in sys.modules)
"""
    assert printed(code)["found"] == "found [] True"


def test_a_loaded_model_has_loaded_neither_compiler_nor_torchvision_nor_video_decoder(lines: dict[str, str]):
    assert lines["loaded"] == "loaded []"


def test_a_deferred_package_is_whole_once_it_is_asked_for(lines: dict[str, str]):
    assert lines["same"] == "same True"
    assert lines["compiled"] == "compiled [2.0, 2.0]"
    assert lines["kept"] == "kept [1]"
    assert lines["resized"] == "resized (3, 4, 4)"
    assert lines["named"] == "named llama False"
    assert lines["told"] == "told apart False False"


def test_marks_set_before_the_compiler_was_loaded_hold(lines: dict[str, str]):
    assert lines["marked"] == "marked True"
