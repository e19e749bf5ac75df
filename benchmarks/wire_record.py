"""Record uploads for benchmarks/wire.py from real runs: the paper's setting at several sparsities.

    python benchmarks/wire_record.py OUT --set data.root=WHERE-CIFAR-10-IS

For each pruner (SynFlow: the server knows the mask; SNIP: every client has its own) and each sparsity one
run of evidence/experiments/base/cifar10.toml with lossy links; after the given rounds one client's next upload is
written as OUT/<pruner><sparsity>-<round>-<client>.npz, with the round as `round`, the mask that the server
expects as `predicted` and the global model of the round before as `previous`. Nothing is compiled: that
would take longer than the rounds do. On a CPU use --rounds 3 10.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from safari.cli.options import read_config
from safari.engine import vectorised
from safari.engine.assembly import assemble
from safari.engine.parts import load_data, rule_of
from safari.engine.sample import save_upload, upload_of
from safari.engine.state import initial

SETTING = Path(__file__).parents[1] / "evidence" / "experiments" / "base" / "cifar10.toml"


def record(config, data, rounds, clients, prefix: Path) -> None:
    """One run with its last arm, and its uploads after those rounds."""
    world = assemble(config, config.seed, data)
    engine = vectorised.prepare(world)
    fed = world.federation(rule_of(config.arms[-1].rule))
    state = initial(world, fed)
    previous = state.model
    for t in range(1, max(rounds) + 1):
        previous = state.model
        state, line, _ = engine(fed, state)
        if t in rounds:
            for client in clients:
                path = prefix.with_name(f"{prefix.name}-{t}-{client}.npz")
                more = {"previous": previous.cpu().numpy(), "round": np.array(t)}
                save_upload(path, upload_of(world, state, client), **more)
            print(f"  round {t}: support {line['support']:.4f}, agreement {line['agreement']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, nargs="+", default=[50, 300], help="record after these rounds")
    parser.add_argument("--clients", type=int, nargs="+", default=[0], help="whose uploads")
    parser.add_argument("--pruners", nargs="+", default=["synflow", "snip"])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.8, 0.9, 0.95])
    parser.add_argument("--config", type=Path, default=SETTING)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change the config")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    last = max(arguments.rounds)
    always = [f"rounds={last}", "wire.every=0", f"evaluation.every={last}", "engine.compile=never"]
    data = None
    for pruner in arguments.pruners:
        for sparsity in arguments.sparsities:
            choice = [f"pruning.pruner={pruner}", f"pruning.sparsity={sparsity}"]
            config = read_config(arguments.config, [*arguments.set, *always, *choice])
            data = load_data(config) if data is None else data
            start = time.perf_counter()
            name = f"{pruner}{round(100 * sparsity)}"
            print(name, flush=True)
            record(config, data, arguments.rounds, arguments.clients, arguments.out / name)
            print(f"  {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
