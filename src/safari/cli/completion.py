"""`safari completion`."""

from __future__ import annotations

import os

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class


@click.command(short_help="Print a script that teaches your shell to complete.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that teaches your shell to complete commands, options, config fields and names.

    \b
    bash:  safari completion bash >> ~/.bashrc
    zsh:   safari completion zsh >> ~/.zshrc
    fish:  safari completion fish > ~/.config/fish/completions/safari.fish

    Then --set up<TAB> offers uplink.name=, and --set uplink.name=<TAB> the links that there are.
    """
    make = get_completion_class(shell)
    if make is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(make(ctx.find_root().command, {}, "safari", "_SAFARI_COMPLETE").source())


class Bash(BashComplete):
    """Bash takes `key=value` apart at the sign: words are split at blanks here, as everywhere else."""

    name = "bash"
    source_template = BashComplete.source_template.replace(
        "COMP_CWORD=$COMP_CWORD", 'COMP_CWORD=$COMP_CWORD SAFARI_LINE="${COMP_LINE:0:$COMP_POINT}"'
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one that is to be completed, and that one."""
        line = os.environ.get("SAFARI_LINE")
        if line is None:
            return super().get_completion_args()
        words = line.split(" ")
        return [word for word in words[1:-1] if word], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """Completion of a word, from the last `=` or `:` on: bash splits words there."""
        if "SAFARI_LINE" not in os.environ or item.type != "plain":
            return super().format_completion(item)
        written = self.get_completion_args()[1]
        kept = max(written.rfind("="), written.rfind(":")) + 1
        return f"{item.type},{item.value[kept:]}"


add_completion_class(Bash)
