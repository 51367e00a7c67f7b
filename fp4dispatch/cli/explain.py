"""``fp4dispatch explain``: which backend would run a GEMM, on this machine or on any other, and why."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from fp4dispatch.backends import registry
from fp4dispatch.cli import explain_text
from fp4dispatch.cli.answers import answer
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.errors import InputError
from fp4dispatch.jit import packages
from fp4dispatch.problem import ACTIVATIONS, CAPTURE_MODES, OPS, OUT_DTYPES, SCALINGS, SF_LAYOUTS

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers

_FACTS = {
    "arch": "capability of the GPU, e.g. 12.0, or none; FP4DISPATCH_ARCH by default",
    "cuda": "CUDA version of torch",
    "torch": "version of torch, or none (there with --cuda by default)",
    "cudnn": "version of cuDNN",
    "cudnn-frontend": "version of nvidia-cudnn-frontend, or none (there with --cudnn by default)",
    "flashinfer": "version of flashinfer-python",
    "cutlass": "version of the CUTLASS headers, or none (there with --nvcc by default)",
    "nvcc": "version of nvcc",
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the command and its arguments."""
    parser = subparsers.add_parser(
        "explain",
        help="show which backend would run a GEMM, on this machine or any other, and why",
        description="Which backend would run D[M,N] = A[M,K] @ B[N,K]^T, and why. Without options for a machine it "
        "means this one. With at least one such option, it means another machine that has only what is given.",
    )
    parser.add_argument("op", choices=OPS, help="by the format of the weights")
    for size, text in (
        ("m", "tokens: rows of A and D"),
        ("n", "outputs: rows of B"),
        ("k", "inputs: columns of A and B"),
    ):
        parser.add_argument(f"-{size}", type=int, required=True, metavar=size.upper(), help=text)
    parser.add_argument("--gpu", metavar="NAME", help="GPU model, e.g. 'H100 SXM': says the arch, predicts times")
    for name, text in _FACTS.items():
        parser.add_argument(f"--{name}", metavar="VERSION", help=text)
    parser.add_argument(
        "--proven",
        nargs="?",
        const=True,
        default=None,
        type=_kernels,
        metavar="KERNELS",
        help="the built kernels are proven there: all for this op, none, or nvfp4_gemm (cutlass), w4_gemm (w4a16, "
        "w4a8), w8_gemm (w8a16, w8a8); default: those that are built and proven here",
    )
    parser.add_argument(
        "--quarantined", type=_names, default=(), metavar="NAMES", help="backends that failed the self-check there"
    )
    parser.add_argument("--disable", type=_names, metavar="NAMES", help="backends that are never used")
    parser.add_argument("--backend", metavar="NAME", help="ask for one backend by name")
    parser.add_argument(
        "--activation",
        choices=ACTIVATIONS,
        default="any",
        help="what A may become before it is multiplied, as a layer's activation= (default: any)",
    )
    parser.add_argument(
        "--scaling", choices=SCALINGS, help="scales of the weights (default: nvfp4 of nvfp4_gemm, tensor of fp8_gemm)"
    )
    parser.add_argument("--out-dtype", choices=OUT_DTYPES, default="bfloat16", help="of D (default: bfloat16)")
    parser.add_argument("--capture", choices=CAPTURE_MODES, default="none", help="CUDA graph capture mode")
    parser.add_argument(
        "--m-min",
        type=int,
        default=1,
        help="smallest M that the caller promises; it decides in piecewise capture, where it may be 0",
    )
    parser.add_argument("--sf-layout", choices=SF_LAYOUTS, help="layout of block scales handed in (raw operands)")
    parser.add_argument("--raw", action="store_true", help="operands are quantised already (raw operators)")
    parser.add_argument("--bias", action="store_true", help="the layer has a bias")
    parser.add_argument(
        "--fp8-copy",
        action="store_true",
        default=None,
        help="as if FP4DISPATCH_FP8_COPY=1 allowed NVFP4 layers a second copy of their weights",
    )
    parser.add_argument(
        "--all", action="store_true", help="also say why backends are not for this problem or not for this GPU"
    )
    parser.add_argument("--json", action="store_true", help="print the decision as JSON, with every candidate")


def run(args: argparse.Namespace) -> int:
    """Print the decision; 1 if no backend can run the problem."""
    if args.fp8_copy and args.op != "nvfp4_gemm":
        raise InputError(f"--fp8-copy: {args.op} has no NVFP4 weights, of which there could be a copy: leave it out")
    quarantined = [registry.canonical(name)[0] for name in args.quarantined]
    if registry.AUTO in quarantined:
        raise InputError("--quarantined auto: auto is no backend; name those that failed their self-check")
    facts = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in _FACTS}
    decision = explain(
        args.op,
        args.m,
        args.n,
        args.k,
        **facts,
        proven=args.proven,
        quarantined=quarantined,
        disabled=args.disable,
        backend=args.backend,
        activation=args.activation,
        scaling=args.scaling,
        out_dtype=args.out_dtype,
        capture=args.capture,
        m_min=args.m_min,
        sf_layout=args.sf_layout,
        raw=args.raw,
        bias=args.bias,
        fp8_copy=args.fp8_copy,
        gpu=args.gpu,
    )
    if args.json:
        answer(json.dumps(decision.to_dict(), indent=2))
    else:
        here = args.gpu is None and not any(facts.values())
        notes = packages.ignored() if here else ()
        explain_text.show(explain_text.lines(decision, everything=args.all, notes=notes))
    return 0 if decision.backend else 1


def _kernels(text: str) -> tuple[str, ...]:
    return () if text == "none" else _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)
