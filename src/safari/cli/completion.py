"""`safari completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(short_help="Print a script that teaches your shell to complete.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that teaches your shell to complete commands, options and config keys.

    \b
    bash:  safari completion bash >> ~/.bashrc
    zsh:   safari completion zsh >> ~/.zshrc
    fish:  safari completion fish > ~/.config/fish/completions/safari.fish
    """
    make = get_completion_class(shell)
    if make is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(make(ctx.find_root().command, {}, "safari", "_SAFARI_COMPLETE").source())
