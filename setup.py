"""Distribution ``megatron-hetero``: the heterogeneous layer and the training harness.

``megatron/`` is a PEP 420 namespace portion: the wheel of megatron-core owns ``megatron/core``, this
distribution adds ``megatron/training`` beside it. Tool settings live in ``pyproject.toml``.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

setup(
    name="megatron-hetero",
    version="0.1.0",
    description="Train one large language model on GPUs that are not alike",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["hetero", "hetero.*", "megatron.training", "megatron.training.*"]),
    package_data={
        "hetero": ["py.typed"],
        "hetero.data": ["*.json", "profiles/*.json", "NOTICE.md"],
        "hetero.report.page": ["*.html.j2"],
    },
    install_requires=[
        "Jinja2>=3.1",
        "matplotlib>=3.9",
        "megatron-core>=0.16.1,<0.17",
        "numpy>=1.26",
        "ortools>=9.11",
        "psutil>=5.9",
        "pydantic>=2.7",
        "PyYAML>=6.0",
        "rich>=13.7",
        "safetensors>=0.4.3",
        "torch>=2.10",
    ],
    extras_require={
        "tokenizers": ["tokenizers>=0.20"],
        "report": ["tensorboard>=2.16"],
        "cuda": ["transformer-engine[pytorch]>=2.0"],
        "test": [
            "hypothesis>=6.100",
            "import-linter>=2.0",
            "mypy>=1.11",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "ruff>=0.6",
            "tensorboard>=2.16",
            "tokenizers>=0.20",
            "transformers>=5.0",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["hetero = hetero.cli:main"]},
)
