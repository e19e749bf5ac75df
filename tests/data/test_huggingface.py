"""Tables written on the spot, read by `hf:` paths; and what cannot be used, in words."""

from __future__ import annotations

import io
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from safari.cli import main
from safari.config import override, parse
from safari.data import as_data, from_hf, hf, store
from safari.engine import assemble, load_data
from safari.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")

N = 40
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (N, 6, 5, 3)).astype(np.uint8)
CLASSES = ["ant", "bee", "cat"]
LABELS = (np.arange(N) * 7 % 3).tolist()
WRITERS = [f"w{i % 4}" for i in range(N)]
WORDS = [f"the {CLASSES[i % 3]} runs over {i}" for i in range(N)]


def pictures(grey: bool = False) -> list[Any]:
    return [Image.fromarray(p[..., 0] if grey else p) for p in PIXELS]


def table(**columns: Any) -> Any:
    features = columns.pop("features", None)
    return datasets.Dataset.from_dict(columns, features=features and datasets.Features(features))


def picture_table() -> Any:
    return table(
        image=pictures(),
        label=LABELS,
        writer=WRITERS,
        features={
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=CLASSES),
            "writer": datasets.Value("string"),
        },
    )


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "data").mkdir(parents=True)
    whole = picture_table()
    whole.select(range(30)).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    whole.select(range(30, N)).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    return folder


def test_pictures_by_path_found_by_their_types(parquet: Path) -> None:
    data = hf(source=str(parquet), owner="writer")
    assert data.name == f"hf:{parquet}"
    assert (data.input_shape, data.classes) == ((3, 6, 5), 3)
    assert data.train_y.tolist() + data.test_y.tolist() == LABELS
    assert data.owners is not None
    assert data.owners.tolist() == [i % 4 for i in range(30)]
    expected = PIXELS.transpose(0, 3, 1, 2) / 255
    mean, spread = (f(expected[:30], axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    both = torch.cat([data.train_x, data.test_x]).numpy()
    np.testing.assert_allclose(both, (expected - mean) / spread, rtol=1e-4, atol=1e-5)
    raw = hf(source=str(parquet), normalise=False)
    np.testing.assert_allclose(raw.train_x, expected[:30], rtol=1e-6)


def test_one_file_and_what_save_to_disk_writes_are_the_same(parquet: Path, tmp_path: Path) -> None:
    whole = picture_table()
    whole.to_parquet(tmp_path / "all.parquet")
    whole.save_to_disk(tmp_path / "saved")
    one, other = (hf(source=str(tmp_path / name), holdout=0.25) for name in ("all.parquet", "saved"))
    assert (len(one.train_y), len(one.test_y)) == (30, 10)
    for field in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(one, field), getattr(other, field))
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "both")
    assert hf(source=str(tmp_path / "both")).test_y.tolist() == LABELS


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for number, picture in enumerate(pictures(grey=True)[:6]):
            folder = tmp_path / "folder" / split / CLASSES[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{number}.png")
    data = hf(source=str(tmp_path / "folder"))
    assert (data.input_shape, data.classes, len(data.train_y), len(data.test_y)) == ((1, 6, 5), 3, 6, 6)


def test_pictures_of_many_sizes_are_scaled_or_refused() -> None:
    odd = table(image=[*pictures()[:3], pictures()[3].resize((4, 4))], label=[0, 1, 0, 1])
    odd = odd.cast_column("image", datasets.Image())
    with pytest.raises(
        DataError, match=r"picture 3 must have the first one's 5x6 pixels, got 4x4; data\.size"
    ):
        from_hf({"train": odd, "test": odd})
    assert from_hf({"train": odd, "test": odd}, size=8).input_shape == (3, 8, 8)


def test_numbers_in_columns_and_in_arrays() -> None:
    x = RNG.standard_normal((N, 2))
    y = RNG.standard_normal(N)
    plain = table(age=x[:, 0], weight=x[:, 1], target=y)
    data = from_hf({"train": plain, "test": plain}, normalise=False)
    assert data.label_kind == "numbers"
    np.testing.assert_allclose(data.train_x, x, rtol=1e-6)
    np.testing.assert_allclose(data.train_y[:, 0], y, rtol=1e-6)
    one = from_hf({"train": plain, "test": plain}, inputs=["weight"])
    assert one.input_shape == (1,)
    assert float(one.train_x.std(correction=0)) == pytest.approx(1, abs=1e-5)
    arrays = table(pixels=RNG.standard_normal((N, 4, 4)).tolist(), y=LABELS)
    assert from_hf({"train": arrays, "test": arrays}).input_shape == (1, 4, 4)
    ragged = table(pixels=[[1.0], [1.0, 2.0]], y=[0, 1])
    with pytest.raises(DataError, match="the column pixels must hold numbers, in arrays of one shape"):
        from_hf({"train": ragged, "test": ragged})


def test_labels_by_the_type_of_their_column() -> None:
    def read(label: Any) -> Any:
        made = table(x=RNG.standard_normal(N), y=label)
        return from_hf({"train": made, "test": made})

    texts = read([CLASSES[i] for i in LABELS])
    assert (texts.train_y.tolist(), texts.classes) == (LABELS, 3)
    assert read([10 * i for i in LABELS]).train_y.tolist() == LABELS
    several = read([[i % 3, 3] if i % 2 else [] for i in range(N)])
    assert several.classes == 4
    assert several.train_y[:2].tolist() == [[0, 0, 0, 0], [0, 1, 0, 1]]
    assert read([[0.5, 1.5]] * N).train_y.shape == (N, 2)
    with pytest.raises(DataError, match="row 2 of the column 'y' is empty"):
        read([0, 1, None, *LABELS[3:]])
    train, test = table(x=[0.0, 1.0], y=["a", "b"]), table(x=[0.0], y=["c"])
    with pytest.raises(
        DataError, match="the label 'c' occurs in the test split and not in the training split"
    ):
        from_hf({"train": train, "test": test})


def test_text_with_a_label_is_a_sequence_of_tokens_to_classify() -> None:
    made = table(text=WORDS, label=LABELS)
    data = from_hf({"train": made, "test": made}, length=10)
    assert data.train_x.dtype == torch.int64
    assert "".join(data.vocabulary[i] for i in data.train_x[1]) == WORDS[1][:10]
    assert (data.tokens, data.classes, data.label_kind) == (len(data.vocabulary), 3, "class")
    by_word = from_hf({"train": made, "test": made}, length=10, tokens="words")
    assert [by_word.vocabulary[i] for i in by_word.train_x[1][:5]] == WORDS[1].split()
    assert set(by_word.train_x[1][5:].tolist()) == {0}
    as_bytes = from_hf({"train": made, "test": made}, length=10, tokens="bytes")
    assert (as_bytes.train_x[1] - 2).tolist() == list(WORDS[1][:10].encode())


def test_text_without_a_label_asks_for_the_next_token() -> None:
    train, test = table(text=["abcdefg", "xy", "z"]), table(text=["ab?"])
    data = from_hf({"train": train, "test": test}, length=4)
    said = [[data.vocabulary[i] for i in row] for row in data.train_x]
    asked = [["-" if i < 0 else data.vocabulary[i] for i in row] for row in data.train_y.tolist()]
    assert said == [["a", "b", "c", "d"], ["e", "f", "", ""], ["x", "", "", ""]]
    assert asked == [["b", "c", "d", "e"], ["f", "g", "-", "-"], ["y", "-", "-", "-"]]
    # What the training text does not hold is unknown.
    assert data.test_y.tolist() == [[data.vocabulary.index("b"), 1, -100, -100]]
    assert data.classes == data.tokens == len(data.vocabulary)


def test_lines_of_a_speaker_can_be_one_text() -> None:
    made = table(line=["ab", "xy", "cd"], who=["p", "q", "p"])
    data = from_hf({"train": made, "test": made}, owner="who", text="line", join=True, length=6)
    assert data.owners is not None
    assert data.owners.tolist() == [0, 1]
    assert "".join(data.vocabulary[i] for i in data.train_x[0]) == "ab\nc"
    apart = from_hf({"train": made, "test": made}, owner="who", text="line", length=6)
    assert apart.owners is not None
    assert apart.owners.tolist() == [0, 1, 0]


def test_a_class_for_each_word() -> None:
    made = table(
        tokens=[["Ann", "runs"], ["go"]],
        ner_tags=[[1, 0], [0]],
        features={
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=["O", "PER"])),
        },
    )
    data = from_hf({"train": made, "test": made}, label="ner_tags", length=3)
    assert (data.label_kind, data.classes) == ("tokens", 2)
    assert data.train_y.tolist() == [[1, 0, -100], [0, -100, -100]]
    short = table(tokens=[["Ann", "runs"]], tags=[[1]])
    with pytest.raises(DataError, match="row 0 of 'tags' must have a label for each of its 2 words, got 1"):
        from_hf({"train": short, "test": short}, label="tags")


def test_large_data_stay_in_a_file(parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = hf(source=str(parquet))
    monkeypatch.setattr(store, "MOST_IN_MEMORY", 100)
    large = hf(source=str(parquet))
    (file,) = (tmp_path / "cache" / "safari").glob("*.npy")
    assert torch.equal(large.train_x, small.train_x)
    assert torch.equal(large.test_x, small.test_x)
    # Found there the next time, and nobody's writing changes it.
    large.train_x.zero_()
    before = file.stat().st_mtime_ns
    assert torch.equal(hf(source=str(parquet)).train_x, small.train_x)
    assert file.stat().st_mtime_ns == before
    lines = table(text=["abcdefg" * 20, "xy"])
    assert len(from_hf({"train": lines, "test": lines}, length=4).train_x) == 36
    assert not list((tmp_path / "cache" / "safari").glob("tmp*"))


def test_a_file_that_is_not_whole_is_never_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_IN_MEMORY", 10)

    def fail(out: Any) -> None:
        out[0] = 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.filled((4, 4), np.float32, ("key",), fail)
    assert list((tmp_path / "cache" / "safari").iterdir()) == []


def test_what_a_function_of_yours_returns_may_be_such_a_table() -> None:
    data = as_data(datasets.DatasetDict({"train": picture_table(), "test": picture_table()}), "mine")
    assert (data.name, data.input_shape) == ("mine", (3, 6, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"label": "lable"},
            "label must be one of image, label, writer; got 'lable' (did you mean 'label'?)",
        ),
        ({"image": "writer"}, "image must name a column of images, and 'writer' holds text"),
        ({"text": "image"}, "text must name a column of texts, and 'image' holds images"),
        (
            {"image": "image", "text": "writer"},
            "only one of image, text and inputs can be given, got image and text",
        ),
        (
            {"inputs": ["writer"]},
            "inputs must name columns of numbers, or one of arrays; 'writer' holds text",
        ),
        ({"train": "trian"}, "train must be one of test, train; got 'trian' (did you mean 'train'?)"),
        ({"test": "tset"}, "test must be one of test, train; got 'tset' (did you mean 'test'?)"),
        ({"size": -1}, "size must be at least 0, got -1"),
        ({"text": "writer", "label": "label", "join": True}, "join makes one text of several rows"),
        ({"text": "writer", "length": 0}, "length must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    tables = {"train": picture_table(), "test": picture_table()}
    with pytest.raises(ConfigError) as error:
        from_hf(tables, **options)
    assert message in str(error.value)


def test_tables_that_leave_it_open() -> None:
    two = table(
        fine=LABELS, coarse=LABELS, x=LABELS,
        features={
            "fine": datasets.ClassLabel(names=CLASSES), "coarse": datasets.ClassLabel(names=CLASSES),
            "x": datasets.Value("int64"),
        },
    )  # fmt: skip
    with pytest.raises(
        DataError, match=r"several columns hold classes \(fine, coarse\); name one as data\.label"
    ):
        from_hf({"train": two, "test": two})
    assert from_hf({"train": two, "test": two}, label="fine", inputs=["x"]).classes == 3
    texts = table(premise=WORDS, hypothesis=WORDS, label=LABELS)
    with pytest.raises(DataError, match=r"several columns hold text \(premise, hypothesis\); .*data\.text"):
        from_hf({"train": texts, "test": texts})
    bare = table(x=[1.0, 2.0])
    with pytest.raises(DataError, match=r"no column of labels was found \(columns: x \(numbers\)\)"):
        from_hf({"train": bare, "test": bare})
    with pytest.raises(DataError, match="the split 'test' has no column 'label'"):
        from_hf({"train": picture_table(), "test": picture_table().remove_columns("label")})
    with pytest.raises(DataError, match="the split 'test' is empty"):
        from_hf({"train": picture_table(), "test": picture_table().select([])})


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        hf(source=str(tmp_path / "none.parquet"))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"a file must end in \.parquet, \.arrow, .*, got '\.txt'"):
        hf(source=str(tmp_path / "notes.txt"))
    with pytest.raises(DataError, match=r"a folder must hold .* files or pictures, and this has none"):
        hf(source=str(tmp_path))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match=r"hf:.*broken\.parquet: "):
        hf(source=str(tmp_path / "broken.parquet"))
    with pytest.raises(
        ConfigError, match="source must name a data set of the hub, a folder or a file, got ''"
    ):
        hf(source="")


def test_a_script_beside_the_data_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    picture_table().to_parquet(folder / "train.parquet")
    assert len(hf(source=str(folder)).train_y) == 36
    assert not (tmp_path / "ran").exists()


# --- from a config, and on the command line


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["safari", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(end.value.code or 0), capsys.readouterr().err


def test_hf_colon_is_short_for_the_source(parquet: Path) -> None:
    config = parse({"data": {"name": f"hf:{parquet}", "owner": "writer"}})
    assert config.data.name == "hf"
    assert config.data.options == {"source": str(parquet), "owner": "writer"}
    assert parse(config.to_dict()) == config
    changed = parse({
        **config.to_dict(), "clients": 4, "partition": {"name": "natural"}, "uplink": {"name": "perfect"}
    })  # fmt: skip
    world = assemble(changed, 0, load_data(changed))
    assert [len(part) for part in world.parts] == [8, 8, 7, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["data.label=lable"],
            "data: label must be one of image, label, writer; got 'lable' (did you mean 'label'?)",
        ),
        (
            ["data.lable=label"],
            "data.lable is not an option (allowed: source, subset, revision, train, test, holdout, image, "
            "text, inputs, label, owner, size, normalise, tokens, length, join, numbers) (did you mean 'label'?)",
        ),
        (
            ["data.text=writer"],
            "model: cnn needs pictures (channels, height, width) of at least 4x4; got (80,); "
            "text is for gru, lstm and transformer, features for mlp",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    parquet: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    settings = [f"data.name=hf:{parquet}", "clients=5", "partition.name=iid", *options]
    arguments = [word for setting in settings for word in ("--set", setting)]
    code, told = run(monkeypatch, capsys, "run", *arguments, "--out", str(tmp_path / "run"))
    assert code == 2
    assert told.splitlines() == [f"error: {message}"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.name=hf:mnist", "data sets named hf:... need datasets: pip install 'safari-fl[hf]'"),
        (
            "partition.name=flwr-iid",
            "the partitions flwr-... need flwr-datasets: pip install 'safari-fl[hf]'",
        ),
    ],
)
def test_without_the_extra(
    setting: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("datasets", "flwr_datasets", "flwr_datasets.partitioner"):
        monkeypatch.setitem(sys.modules, name, None)
    code, told = run(monkeypatch, capsys, "run", "--set", setting, "--out", str(tmp_path / "run"))
    assert code == 2
    assert told.splitlines() == [f"error: {message}"]


CSV = "width,height,kind\n" + "".join(f"{i},{i * i},{'ab'[i % 2]}\n" for i in range(20))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "EmptyDataError: No columns to parse from file"),
        ("width,height,kind\n", "no data"),
        ("width,height,kind\n1,2,a\n", "there must be at least 2 rows, of which some are held out, got 1"),
        (
            CSV + "1,2,a,4\n",
            "ParserError: Error tokenizing data. C error: Expected 3 fields in line 22, saw 4",
        ),
        (CSV + "nan,2,a\n", "the column 'width' must have a finite number in every row"),
        (CSV + "1,,a\n", "the column 'height' must have a finite number in every row"),
    ],
)
def test_files_of_commas_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        hf(source=str(path), inputs=["width", "height"], label="kind")
    assert message in str(error.value)


def test_an_ending_may_be_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "table.CSV"
    path.write_text(CSV)
    assert hf(source=str(path), inputs=["width", "height"], label="kind").train_x.shape == (18, 2)


def test_another_source_of_the_same_kind_keeps_the_options() -> None:
    table = {"data": {"name": "hf", "source": "a.csv", "label": "kind"}}
    assert override(table, [("data.name", "hf:b.csv")])["data"] == {
        "name": "hf:b.csv",
        "label": "kind",
    }
    with pytest.raises(
        ConfigError, match=r"^data\.source must be left out where data\.name has it, 'hf:b\.csv'"
    ):
        parse({"data": {"name": "hf:b.csv", "source": "a.csv"}})
    assert override(table, [("data.name", "leaf")])["data"] == {"name": "leaf"}
    both = override(table, [("data.source", "c.csv"), ("data.name", "hf:b.csv")])
    assert both["data"]["source"] == "c.csv"


def rows(tmp_path: Path, *values: Any) -> str:
    """A Parquet file with a column of pictures as rows say, and a label."""
    column = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    plain = datasets.Features(
        {
            "image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
            "label": datasets.Value("int64"),
        }
    )
    made = datasets.Dataset.from_dict(
        {"image": list(values), "label": [i % 2 for i in range(len(values))]}, features=plain
    )
    # Not by the library's own writer, which asks each address for a size.
    table = made.cast(column)
    pyarrow.parquet.write_table(
        table.with_format("arrow")[:].cast(table.features.arrow_schema), tmp_path / "rows.parquet"
    )
    return str(tmp_path / "rows.parquet")


def encoded(kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    pictures()[0].save(out, kind)
    return out.getvalue()


def test_a_row_s_address_is_not_followed(tmp_path: Path) -> None:
    """Neither over the network nor on this machine; whoever listens is not asked."""
    good = {"bytes": encoded(), "path": None}
    (tmp_path / "here.png").write_bytes(encoded())
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        for path in (f"http://127.0.0.1:{server.getsockname()[1]}/x.png", str(tmp_path / "here.png")):
            source = rows(tmp_path, good, {"bytes": None, "path": path}, good, good)
            with pytest.raises(
                DataError, match=r"^picture \d of the column 'image' is missing: .* is not followed"
            ):
                hf(source=source)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert len(hf(source=rows(tmp_path, good, good, good, good)).train_y) == 3


def test_pictures_in_formats_that_start_programs_are_not_decoded(tmp_path: Path) -> None:
    bad = {"bytes": encoded("EPS"), "path": None}
    with pytest.raises(DataError, match=r"picture 0 of the column 'image' cannot be read \(PNG, JPEG"):
        hf(source=rows(tmp_path, bad, bad, bad))


def test_a_local_table_asks_the_hub_nothing(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library counts downloads, also of local files, with a request."""
    asked = []

    class Session:
        def head(self, *arguments: Any, **options: Any) -> None:
            asked.append(arguments)

    monkeypatch.setattr(datasets.load, "get_session", Session)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hf(source=str(parquet))
    assert not asked
    assert datasets.config.HF_HUB_OFFLINE is False
    datasets.load.increase_load_count("parquet")
    assert asked
