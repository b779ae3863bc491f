"""Rows 36 and 37: run files and checkpoints that somebody made to do harm."""

import json
import os
import pickle
import shutil
import struct

import pytest

from engine_core.runs.checkpoint import problems

pytestmark = pytest.mark.chaos

# run files


def billion_tables():
    """Files of a few lines that extend each other doubly: 2 ** 20 merges if nobody counted."""
    files = {f"l{i}.toml": f'extends = ["l{i + 1}.toml", "l{i + 1}.toml"]\n' for i in range(20)}
    return {**files, "l20.toml": "[run]\nsteps = 1\n", "run.toml": 'extends = ["l0.toml"]\n'}


HOSTILE = {  # files, what is said
    "deep arrays": ({"run.toml": "x = " + "[" * 100_000 + "]" * 100_000}, "run.toml:1"),
    "deep tables": ({"run.toml": "[" + ".".join("a" * 5000) + "]\n"}, "run.toml:1"),
    "deep inline tables": ({"run.toml": "x = " + "{a = " * 5000 + "1" + "}" * 5000}, "run.toml:1"),
    "a hundred megabytes": ({"run.toml": None}, "larger than 1 MB"),
    "a circle": ({"run.toml": 'extends = ["b.toml"]\n', "b.toml": 'extends = ["run.toml"]\n'}, "in a circle"),
    "itself": ({"run.toml": 'extends = ["run.toml"]\n'}, "in a circle"),
    "a file above": ({"run.toml": 'extends = ["../../../../etc/passwd"]\n'}, "is outside"),
    "an absolute file": ({"run.toml": 'extends = ["/etc/passwd"]\n'}, "is outside"),
    "merges without end": (billion_tables(), "more than 64 files are extended"),
    "an endless number": ({"run.toml": "[run]\nsteps = " + "9" * 10_000}, "run.toml"),
    "a device": ({"run.toml": "link:/dev/zero"}, "there is no such file"),
    "no text": ({"run.toml": "\udcff\udcfe"}, "not UTF-8"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_run_file_is_refused_at_once_and_nothing_of_other_files_is_shown(engine, tmp_path, what):
    files, told = HOSTILE[what]
    for name, text in files.items():
        path = tmp_path / name
        if text is None:
            with path.open("wb") as file:
                file.truncate(100_000_000)
        elif text.startswith("link:"):
            path.symlink_to(text.removeprefix("link:"))
        else:
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"
    for command in ("validate", "train"):
        run = engine(command, "run.toml", prelude=limit)
        assert run.code == 2, run.err[-2000:]
        assert told in run.err
        assert "root:" not in run.err  # of /etc/passwd
        assert "Traceback" not in run.err
        assert len(run.err) < 5000
    assert not (tmp_path / "runs").exists()


def test_a_link_out_of_the_folder_is_no_way_around(engine, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "secret.toml").write_text("[run]\nsteps = 1\n")
    (tmp_path / "below" / "base.toml").symlink_to(tmp_path / "secret.toml")
    (tmp_path / "below" / "run.toml").write_text('extends = ["base.toml"]\n')
    run = engine("validate", "below/run.toml")
    assert run.code == 2
    assert "is outside" in run.err


@pytest.mark.parametrize(
    "text", ["${env:AWS_SECRET}", "${AWS_SECRET}", "$AWS_SECRET", "{{ AWS_SECRET }}", "%(AWS_SECRET)s"]
)
def test_nothing_is_interpolated(engine, tiny, text):
    run = engine("config", "show", tiny({"data.system": text}), env={"AWS_SECRET": "what-nobody-may-see"})
    assert run.code == 0, run.err
    assert json.dumps(text) in run.out
    assert "what-nobody-may-see" not in run.out


def test_a_run_name_cannot_leave_the_folder_of_runs(engine, tiny, tmp_path):
    for name in ("../out", "/tmp/out", "..", "a/b", ""):
        run = engine("train", tiny({"run.name": name}))
        assert run.code == 2
        assert "run.name" in run.err
    assert not (tmp_path.parent / "out").exists()


# checkpoints


@pytest.fixture
def finished(engine, tiny):
    """A run of one step, and the folder of its only checkpoint."""
    run = engine("train", tiny({"run.steps": 1}))
    assert run.code == 0, run.err
    return engine.folder / "runs" / "r" / "checkpoints" / "step_00000001"


def entry(path):
    import hashlib

    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def add(folder, name, data, listed=None):
    """Put a file into a checkpoint, with a manifest that vouches for it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    vouch(folder, listed or name, entry(path))


def vouch(folder, name, found):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = found
    (folder / "manifest.json").write_text(json.dumps(manifest))


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def bomb_of(folder):
    """The folder that a bomb in this checkpoint makes."""
    return folder.parents[3] / "bomb"


def with_pickle(name):
    def craft(folder):
        add(folder, name, pickle.dumps(Bomb(bomb_of(folder))))

    return craft


def with_outside(name):
    def craft(folder):
        vouch(folder, name, {"bytes": 1, "sha256": "0" * 64})

    return craft


def linked(folder):
    weights = folder / "actor" / "weights.safetensors"
    moved = folder.parents[2] / "elsewhere"
    weights.rename(moved)
    weights.symlink_to(moved)


def linked_folder(folder):
    moved = folder.parents[2] / "elsewhere"
    (folder / "actor").rename(moved)
    (folder / "actor").symlink_to(moved)


def giant_header(folder):
    data = struct.pack("<Q", 2**62) + b"{}"
    add(folder, "actor/weights.safetensors", data)


def header_over_limit(folder):
    data = struct.pack("<Q", 200_000_000) + b"{" + b" " * 199_999_998 + b"}"
    add(folder, "actor/weights.safetensors", data)


def not_tensors(folder):
    add(folder, "actor/weights.safetensors", pickle.dumps(Bomb(bomb_of(folder))))


def big_manifest(folder):
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(100_000_000)


def deep_manifest(folder):
    (folder / "manifest.json").write_text('{"files": ' + "[" * 200_000)


def deep_state(folder):
    add(folder, "state.json", b'{"step": 1, "data": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")


def no_state(folder):
    add(folder, "state.json", b"[1, 2, 3]")


def empty_state(folder):
    add(folder, "state.json", b'{"step": 1}')


def deep_engine_state(folder):
    add(folder, "actor/state.json", b"[" * 200_000 + b"]" * 200_000)


def renamed(folder):
    folder.rename(folder.with_name("step_00000009"))


def unlisted(folder):
    (folder / "actor" / "extra.safetensors").write_bytes(b"x")


HOSTILE_CHECKPOINTS = {
    "a pickle as another file": with_pickle("actor/optimizer.pt"),
    "a pickle of another suffix": with_pickle("actor/extra.bin"),
    "a pickle for weights": not_tensors,
    "an absolute path": with_outside("/etc/passwd"),
    "a path above": with_outside("../../../../../../etc/passwd"),
    "a path with backslashes": with_outside("..\\..\\x"),
    "a link to a file": linked,
    "a link to a folder": linked_folder,
    "a header of 2**62 bytes": giant_header,
    "a header of 200 MB": header_over_limit,
    "a manifest of 100 MB": big_manifest,
    "a deep manifest": deep_manifest,
    "a deep state": deep_state,
    "a state that is no table": no_state,
    "a state without its parts": empty_state,
    "a deep state of the engine": deep_engine_state,
    "a folder renamed to another step": renamed,
    "a file that the manifest does not list": unlisted,
}


QUICK = {
    "a pickle for weights",
    "a path above",
    "a link to a folder",
    "a header of 2**62 bytes",
    "a deep manifest",
    "a state without its parts",
    "a deep state of the engine",
    "a folder renamed to another step",
    "a file that the manifest does not list",
}
"""One of each kind of attack; its variants only in ``make test-full``."""


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=[] if w in QUICK else pytest.mark.slow) for w in HOSTILE_CHECKPOINTS]
)
def test_a_hostile_checkpoint_is_refused_runs_nothing_and_changes_nothing(engine, finished, tmp_path, what):
    HOSTILE_CHECKPOINTS[what](finished)
    run = finished.parents[1]
    before = (run / "metrics.jsonl").read_text()
    bomb = bomb_of(finished)
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
    resumed = engine("resume", "r", "--steps", 2, prelude=limit)
    assert resumed.code in (2, 4), resumed.err[-2000:]
    assert "Traceback" not in resumed.err
    assert not bomb.exists()
    assert (run / "metrics.jsonl").read_text() == before
    assert "root:" not in resumed.err


MALFORMED = [
    ("state.json", ["step"], "7"),
    ("state.json", ["data"], {}),
    ("state.json", ["data"], {"epoch": "x"}),
    ("state.json", ["trainer"], {}),
    ("state.json", ["trainer", "skipped_in_a_row"], 3),
    ("state.json", ["random"], {}),
    ("state.json", ["random", "python"], [3, "x", None]),
    ("state.json", ["random", "numpy"], ["MT19937", [1, 2], 0, 0, 0.0]),
    ("state.json", ["metrics"], []),
    ("state.json", ["config"], "x"),
    ("state.json", ["plugins"], ["rewards"]),
    ("actor/state.json", [], [1]),
    ("actor/state.json", ["optimizer"], {}),
    ("actor/state.json", ["optimizer", "groups"], 5),
    ("actor/state.json", ["optimizer", "groups", 0, "params"], None),
    ("actor/state.json", ["optimizer", "values"], {"nobody/step": 1}),
    ("actor/state.json", ["lr_scheduler"], "x"),
    ("actor/state.json", ["num_skipped_steps"], None),
    ("actor/state.json", ["random"], {}),
    ("actor/state.json", ["random", "cpu"], "AAAA"),
    ("actor/state.json", ["random", "cpu"], 5),
]


QUICK_FORMS = (0, 1, 7, 10, 11, 14, 20)  # numbers in MALFORMED: each reader of a state once


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        pytest.param(*form, marks=[] if number in QUICK_FORMS else pytest.mark.slow)
        for number, form in enumerate(MALFORMED)
    ],
    ids=lambda v: ".".join(map(str, v)) if isinstance(v, list) else str(v),
)
def test_a_state_of_another_form_is_refused_by_file_and_changes_nothing(engine, finished, file, path, value):
    state = json.loads((finished / file).read_text())
    *above, last = [None, *path]
    holder = {None: state}
    for key in above:
        holder = holder[key]
    holder[last] = value
    add(finished, file, json.dumps(state if path else value).encode())
    before = (finished.parents[1] / "metrics.jsonl").read_text()
    resumed = engine("resume", "r", "--steps", 2)
    assert resumed.code == 4, resumed.err[-2000:]
    named = "The checkpoint's data position" if path[:1] == ["data"] else f"{finished.name}/{file}"
    assert named in resumed.err
    assert "Traceback" not in resumed.err
    assert (finished.parents[1] / "metrics.jsonl").read_text() == before


def test_the_bomb_of_these_tests_would_go_off_if_anybody_unpickled_it(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "bomb")))  # noqa: S301
    assert (tmp_path / "bomb").is_dir()


def test_a_checkpoint_is_copied_whole_and_still_good(engine, finished, tmp_path):
    """What is refused above is the harm, not the change of place."""
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(finished.parents[1], copy, symlinks=True)
    assert problems(copy / "checkpoints" / finished.name) == []
    assert engine("resume", copy, "--steps", 2).code == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/attempt_0/run.log", "tensorboard", "env.json"])
def test_a_prepared_run_folder_with_a_link_is_refused_and_its_target_is_not_written(engine, tiny, name):
    folder, target = engine.folder / "runs" / "r", engine.folder / "target"
    (folder / name).parent.mkdir(parents=True)
    (folder / ".lock").touch()
    target.touch()
    (folder / name).symlink_to(target)
    run = engine("train", tiny())
    assert run.code == 2, run.err
    assert "run.name: 'r' exists already" in run.err
    assert target.read_text() == ""
    assert (folder / name).is_symlink()


def test_links_of_a_run_that_is_resumed_are_not_written_through(engine, tiny):
    assert engine("train", tiny({"run.steps": 1})).code == 0
    folder, target = engine.folder / "runs" / "r", engine.folder / "target"
    target.write_text("of the user")
    for name in ("metrics.jsonl", ".lock"):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
    for command in (["resume", "r", "--steps", 2], ["prune", "r"]):
        refused = engine(*command)
        assert refused.code == 4, refused.err
        assert f"{folder / '.lock'} is a link" in refused.err
    (folder / ".lock").unlink()
    resumed = engine("resume", "r", "--steps", 2)
    assert resumed.code == 0, resumed.err
    assert target.read_text() == "of the user"
    assert not (folder / "metrics.jsonl").is_symlink()
