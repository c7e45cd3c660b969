"""What TorchX's schedulers are asked for the components; run it to write the golden files anew.

python -m tests.launch.torchx_cases
"""

import re
import sys
from pathlib import Path
from typing import Any

from torchx.runner import get_runner
from torchx.specs import AppDef
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_component

ROOT = Path(__file__).parents[2]
FILE = str(ROOT / "components/nightjar.py")
GOLDEN = Path(__file__).parent / "golden" / "torchx"
IMAGE = "registry.example/nightjar@sha256:" + "ab" * 32
OVERRIDES = ["--", "experiment=criteo", "store=s3://models/store"]
CHAIN = ["chain", "--image", IMAGE, "--env", "AWS_REGION=eu-1", *OVERRIDES]
TRAIN = [
    "train",
    "--image",
    IMAGE,
    "--hosts",
    "2",
    "--nproc",
    "8",
    "-h",
    "aws_p4d.24xlarge",
    "--mounts",
    "type=volume,src=fs-1,dst=/mnt/clicks",
    *OVERRIDES,
]
VENV = ["train", "--hosts", "2", "--nproc", "8", "--gpu", "8", *OVERRIDES]  # Slurm's jobs run this Python
PREDICT = [
    "predict",
    "--path",
    "s3://clicks/2026-01-01/",
    "--out",
    "s3://scores/2026-01-01.parquet",
    "--model",
    "clicks",
    "--ranks",
    "4",
    "--image",
    IMAGE,
    "--cpu",
    "4",
    "--",
    "store=s3://models/store",
    "--no-label",
]
NAMESPACE = {"namespace": "training"}
# File: scheduler, its configuration, component and arguments.
REQUESTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "kubernetes-chain.txt": (
        "kubernetes",
        {**NAMESPACE, "queue": "ads", "service_account": "nightjar-launcher"},
        CHAIN,
    ),
    "kubernetes-predict.txt": ("kubernetes", {**NAMESPACE, "queue": "ads"}, PREDICT),
    "kubernetes-train.txt": ("kubernetes", {**NAMESPACE, "queue": "ads"}, TRAIN),
    "kubernetes_mcad-train.txt": ("kubernetes_mcad", {**NAMESPACE, "image_repo": None}, TRAIN),
    "local_docker-train.txt": ("local_docker", {}, TRAIN),
    "slurm-train.txt": ("slurm", {"partition": "gpu", "time": "24:00:00"}, VENV),
    "aws_batch-train.txt": ("aws_batch", {"queue": "gpu", "user": "nightjar"}, TRAIN),
}


def component(name: str, *arguments: str) -> AppDef:
    """The app that ``torchx run`` makes of the component ``name`` with ``arguments``."""
    return materialize_appdef(get_component(f"{FILE}:{name}").fn, list(arguments))


def request(name: str) -> str:
    """What golden file ``name`` should say: the request, with a fixed name in place of the drawn one."""
    scheduler, cfg, (function, *arguments) = REQUESTS[name]
    with get_runner() as runner:
        text = str(runner.dryrun(component(function, *arguments), scheduler, cfg=cfg))
    text = re.sub(r"(nightjar(?:-train|-predict)?)-[a-z][a-z0-9]{9,}", r"\1-drawn", text)
    return text.replace(sys.executable, "/shared/venv/bin/python").rstrip() + "\n"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file in REQUESTS:
        (GOLDEN / file).write_text(request(file))
