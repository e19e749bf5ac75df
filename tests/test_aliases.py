"""Names of other frameworks for what a config calls otherwise."""

from __future__ import annotations

import pytest

from safari.aliases import AliasWarning
from safari.cli import main
from safari.config import override, parse
from safari.errors import ConfigError


def test_names_of_other_frameworks_are_understood_and_noted():
    with pytest.warns(AliasWarning) as notes:
        config = parse(
            {"local": {"learning_rate": 0.5, "optimizer": "sgd", "batch_size": 7}, "arms": ["fedavg"]}
        )
    assert (config.local.lr, config.local.optimiser, config.local.batch) == (0.5, "sgd", 7)
    assert [(arm.name, arm.rule.name) for arm in config.arms] == [("fedavg", "drop")]
    assert {str(note.message) for note in notes} == {
        "local.learning_rate is called local.lr here",
        "local.optimizer is called local.optimiser here",
        "local.batch_size is called local.batch here",
        "arms: the rule fedavg is called drop here",
    }


def test_a_setting_by_its_other_name_takes_the_place_of_the_field():
    with pytest.warns(AliasWarning, match=r"local\.lr"):
        assert override({"local": {"lr": 1.0}}, [("local.learning_rate", 2.0)]) == {"local": {"lr": 2.0}}


def test_both_names_at_once_are_refused():
    with pytest.warns(AliasWarning), pytest.raises(ConfigError, match=r"local\.learning_rate and local\.lr"):
        parse({"local": {"lr": 1.0, "learning_rate": 2.0}})


def test_the_command_says_the_name_as_a_note(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.toml").write_text('arms = ["fedavg"]\n[local]\nlearning_rate = 0.01\n')
    monkeypatch.setattr("sys.argv", ["safari", "validate", str(tmp_path / "mine.toml")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = capsys.readouterr().err
    assert "note: local.learning_rate is called local.lr here\n" in said
    assert "note: arms: the rule fedavg is called drop here\n" in said
