"""What is particular to files: the manifest is last, damage is seen, old updates go."""

import json

import pytest

from engine_core.contracts.weight_transport import WeightUpdate
from engine_core.errors import ConfigError, TrainingFailed
from engine_plugin_processes import buckets
from engine_plugin_processes.transports.folder import MANIFEST, Folder
from engine_plugin_processes.transports.table import FolderOptions


@pytest.fixture
def ends(link, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    return link("folder", timeout_seconds=0.3)


def test_a_damaged_part_is_found_and_refused_with_its_file(ends, weights):
    sender, receiver = ends.ends
    sender.send(weights.items(), WeightUpdate(1, 7))
    part = sender.root / "update-00000001" / "part-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(TrainingFailed, match=r"part-00001\.safetensors is missing or damaged: its checksum"):
        list(receiver.receive(WeightUpdate(1, 7)))


def test_without_its_manifest_an_update_is_not_there(ends, weights):
    sender, receiver = ends.ends
    sender.send(weights.items(), WeightUpdate(1, 7))
    (sender.root / "update-00000001" / MANIFEST).unlink()
    with pytest.raises(TrainingFailed, match=r"manifest\.json was not there within 0\.3 s"):
        list(receiver.receive(WeightUpdate(1, 7)))


def test_an_update_of_another_version_is_refused(ends, weights):
    sender, receiver = ends.ends
    sender.send(weights.items(), WeightUpdate(1, 7))
    file = sender.root / "update-00000001" / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 6}))
    with pytest.raises(TrainingFailed, match="is of another update"):
        list(receiver.receive(WeightUpdate(1, 7)))


def test_two_updates_are_kept_and_none_when_the_run_ends(ends, weights):
    sender, receiver = ends.ends
    for number in range(1, 5):
        sender.send(weights.items(), WeightUpdate(number, number))
        assert len(list(receiver.receive(WeightUpdate(number, number)))) == 4
    assert sorted(path.name for path in sender.root.iterdir()) == ["update-00000003", "update-00000004"]
    sender.close()
    assert not sender.root.exists()


def test_a_folder_that_the_receiver_does_not_see_is_told_with_its_key(ends, tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.folder\.path: rollout\[1\] on there does not see"):
        ends.ends[1].join([str(tmp_path / "elsewhere"), ""])


def test_on_several_machines_the_folder_must_be_named():
    with pytest.raises(ConfigError, match=r"rollout\.folder\.path: missing"):
        Folder.check(FolderOptions(), one_machine=False)
    Folder.check(FolderOptions(path="/shared"), one_machine=False)
    Folder.check(FolderOptions(), one_machine=True)


def test_the_path_is_relative_to_the_run_files_folder(tmp_path):
    read = FolderOptions.model_validate({"path": "weights"}, context={"folder": tmp_path})
    assert read.path == str(tmp_path.resolve() / "weights")
