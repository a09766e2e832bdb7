"""The command line: exit codes, one line for each mistake, JSON, and examples that parse."""

from __future__ import annotations

import inspect
import io
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from records import H200, some_record

from fagen import __version__
from fagen.cli import app as cli
from fagen.device import ARCHITECTURES, KNOWN_DEVICES, Device, architecture, typical_device
from fagen.errors import DeviceError, UnsupportedError, WriteError
from fagen.kernels.registry import AnyConfig, default_config
from fagen.problem import Problem, Shape
from fagen.records.calls import Calls, save_calls
from fagen.records.store import Card, TunedConfig, load_records, save_records, shipped_path
from fagen.run import driver
from fagen.show.recheck import Rechecked
from fagen.tuning.events import (
    ModelJudged,
    Notice,
    OnEvent,
    PhaseChanged,
    RecordSaved,
    TaskDone,
    TaskStarted,
    TrialDone,
)
from fagen.tuning.options import TuneOptions
from fagen.tuning.outcome import Measured, Trial
from fagen.tuning.tasks import Task
from fagen.tuning.tuner import TuneResult
from fagen.tuning.worker import Worker


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Fagen = Callable[..., Ran]


@pytest.fixture
def fagen(capfd: pytest.CaptureFixture[str]) -> Fagen:
    """Runs a command line in this process."""

    def run(*words: str) -> Ran:
        code = cli.main(words)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers on every machine."""

    def none() -> int:
        raise DeviceError("no usable CUDA driver (a test)")

    monkeypatch.setattr(driver, "device_count", none)


EXPLAIN = ("explain", "--arch", "sm90")
EMIT = ("emit", "--arch", "sm90", "--dtype", "bf16", "--head-dim", "128", "-o", "-")
FROM = ("tune", "--arch", "sm90", "--from")
TUNE = ("tune", "--arch", "sm90", "--dtype", "bf16", "--head-dim", "64", "--seqlen", "512")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*EXPLAIN[:1], "--arch", "sm95"), "sm80, sm86, sm89, sm90"),
        ((*EXPLAIN, "--head-dim", "12"), "multiple of 8"),
        ((*EXPLAIN, "--head-dim", "512"), "256"),
        ((*EXPLAIN, "--head-dim", "many"), "integer"),
        ((*EXPLAIN, "--dtype", "fp64"), "'fp16' or 'bf16'"),
        ((*EXPLAIN, "--heads", "6", "--heads-kv", "4"), "multiple of heads_kv"),
        ((*EXPLAIN, "--heads", "6", "--kv-heads", "4"), "multiple of heads_kv"),
        ((*EXPLAIN, "--heads-kv", "4", "--kv-heads", "4"), "give only one"),
        ((*TUNE, "--heads-kv", "4", "--kv-heads", "4"), "give only one"),
        ((*EXPLAIN, "--seqlen", "-1"), "seqlen_q"),
        ((*EXPLAIN, "--config", "no/such.yaml"), "no/such.yaml"),
        (("explain",), "--arch"),
        ((*EMIT, "--set", "block_m=100"), "multiple of 16 (got '100')"),
        ((*EMIT, "--set", "block_m=144"), "64, 128 or 192"),
        ((*EMIT, "--set", "block_q=128"), "block_m, block_n, block_k"),
        ((*EMIT, "--set", "block_m"), "an axis and its value"),
        ((*EMIT, "--set", "=128"), "an axis and its value"),
        ((*EMIT[:-1], __file__), "is not a folder"),
        ((*EMIT, "--set", "template=forward_sm70"), "forward_sm90"),
        ((*EMIT, "--format", "elf"), "cu, ptx, cubin"),
        (("emit", "--arch", "sm90", "--dtype", "bf16", "-o", "-"), "--head-dim"),
        (("emit", "--arch", "sm90"), "--out"),
        (
            ("emit", "--arch", "sm90", "--batch", "4", "--heads-kv", "7", "-o", "-"),
            "--batch, --hea",
        ),
        (("emit", "--arch", "sm90", "--batch", "4", "--kv-heads", "7", "-o", "-"), "--batch, --kv"),
        ((*TUNE, "--budget", "5x"), "90s, 5m or 1h"),
        ((*TUNE, "--budget", "0m"), "90s, 5m or 1h"),
        ((*TUNE, "--sampler", "oracle"), "'surrogate', 'tpe', 'random'"),
        ((*TUNE, "--seqlen", "512;1024"), "512,2048,8192"),
        ((*TUNE, "--effort", "huge"), "'quick' or 'full'"),
        ((*TUNE, "--head-dim", "12"), "multiple of 8"),
        ((*TUNE, "--head-dim", "0"), "greater than or equal to 8"),
        ((*TUNE, "--budget", ""), "90s, 5m or 1h"),
        ((*TUNE[:1], "--arch", ""), "sm80, sm86"),
        ((*TUNE, "--device", "3"), "CUDA device"),
        ((*TUNE, "--set", "block_n=64,100"), "multiple of 16 (got '100')"),
        ((*TUNE, "--set", "block_n=64,"), "block_n: Input should be a valid integer"),
        ((*TUNE, "--set", "block_q=128"), "block_m, block_n, block_k"),
        ((*TUNE, "--set", "block_n"), "an axis and its value"),
        ((*TUNE, "--device", "0,x"), "at least 0 with commas"),
        (("tune", "--compile-only"), "name the architecture with --arch"),
        ((*TUNE, "--compile-only", "--device", "0"), "leave out --device and --out"),
        (("tune",), "--arch"),
        ((*TUNE, "--from", "x.yaml"), "leave out --dtype, --head-dim, --seqlen"),
        ((*FROM, "x.yaml", "--no-causal", "--heads-kv", "2"), "leave out --causal, --heads-kv"),
        ((*FROM, "x.yaml", "--no-causal", "--kv-heads", "2"), "leave out --causal, --kv-heads"),
        ((*FROM, "no/such.yaml"), "cannot read no/such.yaml"),
        ((*FROM, __file__), "test_cli.py"),
        ((*FROM, "/dev/zero"), "not a file of recorded calls"),
        (("bench", "--against", "fa9"), "fa3, fa4, cudnn, fa2, flex"),
        (("bench", "--from", "x.json", "--grid", "B", "--seqlen", "9"), "out --grid, --seqlen"),
        (("bench", "--plot", "x.jpg"), "ending in .png"),
        (("bench", "--grid", "D"), "allowed are A, B, C"),
        (("bench", "--grid", "B", "--head-dim", "64"), "grid B does not have"),
        (("bench", "--seqlen", ""), "512,2048,8192"),
        (("bench", "--seqlen", "32768"), "1 to 16384"),
        (("bench", "--from", "no.json"), "no.json"),
        (("bench",), "driver"),
        (("check", "--arch", "volta"), "sm80"),
        (("recheck",), "no CUDA device here"),
        (("recheck",), "no CUDA device here to measure on; `fagen check`"),
        (("recheck", "--arch", "sm90"), "device here to measure on; `fagen check"),
        (("verify",), "no CUDA device here to measure on; `fagen check`"),
        (("check", "--sample", "-1"), "--sample"),
        (("list", "--arch", "sm1"), "sm80"),
        (("lits",), "lits"),
        (("list", "--jsn"), "--jsn"),
        (("cache",), "Missing command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(
    fagen: Fagen, words: tuple[str, ...], said: str
) -> None:
    code, out, err = fagen(*words)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


def test_a_file_with_a_tag_is_refused_and_runs_nothing(fagen: Fagen, tmp_path: Path) -> None:
    trap, mark = tmp_path / "trap.yaml", tmp_path / "mark"
    trap.write_text(f"schema: !!python/object/apply:os.mkdir ['{mark}']\nrecords: []\n")
    for words in (("list", "--config", str(trap)), ("--config", str(trap), "list")):
        code, _, err = fagen(*words)
        assert code == 2
        assert len(err.splitlines()) == 1
        assert "tag" in err
    assert not mark.exists()


# ---- help ----


def commands() -> dict[str, Any]:
    """Every command by its full name."""
    found: dict[str, Any] = {}
    for name in cli.COMMANDS:
        command = cli.load(name)
        if hasattr(command, "commands"):
            found |= {f"{name} {leaf}": each for leaf, each in command.commands.items()}
        else:
            found[name] = command
    return found


def test_every_module_of_a_command_is_a_command() -> None:
    folder = Path(cli.__file__).parent / "commands"
    assert {path.stem for path in folder.glob("[!_]*.py")} == cli.COMMANDS.keys()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    assert str(cli.load(name).help).split("\n\n")[0].replace("\n", " ") == cli.COMMANDS[name]


@pytest.mark.parametrize("name", commands())
def test_the_examples_stand_in_the_help_and_parse(fagen: Fagen, name: str) -> None:
    shown = fagen(*name.split(), "--help")
    assert shown.code == 0
    examples = re.findall("`(fagen .*?)`", commands()[name].epilog)
    assert examples
    for example in examples:
        assert example in re.sub(r"\s+", " ", shown.out)
        words = shlex.split(example)[1:]
        assert words[: len(name.split())] == name.split()
        commands()[name].make_context(name, words[len(name.split()) :])  # raises what a user sees


def test_the_help_lists_every_command_and_no_old_name(fagen: Fagen) -> None:
    shown = fagen("--help").out
    assert re.findall(r"^│ ([a-z]+) ", shown, flags=re.MULTILINE) == list(cli.COMMANDS)
    assert "--kv-heads" not in fagen("tune", "--help").out


def test_the_contract_of_the_flags() -> None:
    """Names that scripts rely on."""
    wanted = {
        "tune": "--arch --dtype --head-dim --causal --no-causal --seqlen --batch --heads"
        " --heads-kv --kv-heads --from --effort --trials --budget --sampler --seed --set --device"
        " --storage --resume --out",
        "emit": "--arch --dtype --head-dim --causal --no-causal --set --format -o",
        "list": "--config --json",
        "explain": "--arch --dtype --head-dim --causal --no-causal --seqlen --batch --heads"
        " --heads-kv --kv-heads",
        "bench": "--json --readme --plot --from --grid --against --dtype --seqlen --head-dim",
        "check": "--arch",
        "recheck": "--arch --dtype --head-dim --causal --no-causal --config --storage --json",
        "doctor": "",
    }
    wanted["verify"] = wanted["recheck"]  # its old name
    for name, flags in wanted.items():
        there = {
            flag
            for parameter in cli.load(name).params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        assert set(flags.split()) <= there, name


def test_defaults_and_choices_are_those_of_the_rooms() -> None:
    from fagen.show import bench, check, peers
    from fagen.tuning import options, tasks

    def commas(values: Iterable[object]) -> str:
        return ",".join(map(str, values))

    flags = {
        name: {parameter.name: parameter for parameter in commands()[name].params}
        for name in ("tune", "bench", "check")
    }
    assert flags["tune"]["seqlen"].default == commas(tasks.STANDARD_SEQLENS)
    help_of_effort = flags["tune"]["effort"].help
    assert flags["tune"]["effort"].default == "full"
    for effort, trials in options.TRIALS.items():
        assert f"{effort}: {trials}" in help_of_effort
    assert commas(tasks.STANDARD_HEAD_DIMS) in flags["tune"]["head_dim"].help.replace(", ", ",")
    assert all(sampler in flags["tune"]["sampler"].help for sampler in options.SAMPLERS)
    assert commas(bench.SEQLENS) in flags["bench"]["seqlen"].help
    assert commas(bench.HEAD_DIMS) in flags["bench"]["head_dim"].help
    assert flags["bench"]["against"].default == commas(bench.DEFAULT_PEERS)
    assert commas(peers.PEERS) in flags["bench"]["against"].help
    assert all(f"{grid}: " in flags["bench"]["grid"].help for grid in bench.GRIDS)
    sample = inspect.signature(check.check).parameters["sample"]
    assert flags["check"]["sample"].default == sample.default


def test_no_words_is_help_and_version_is_one_line(fagen: Fagen) -> None:
    assert fagen().code == 0
    assert fagen("--version").out == f"fagen {__version__}\n"


def test_help_imports_no_room() -> None:
    script = (
        "import sys; from fagen import cli; cli.main(['--help']);"
        "print([m for m in ('optuna', 'jinja2', 'cupy', 'torch', 'pydantic', 'numpy')"
        " if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"


# ---- answers ----


def test_list_of_an_empty_store(fagen: Fagen, tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("schema: 1\nrecords: []\n")
    assert "fagen tune" in fagen("list", "--config", str(empty)).out
    assert json.loads(fagen("list", "--config", str(empty), "--json").out) == []


def test_explain_says_config_and_tier(fagen: Fagen) -> None:
    words = (*EXPLAIN, "--head-dim", "64", "--causal", "--seqlen", "512")
    answer = json.loads(fagen(*words, "--json").out)
    assert answer["problem"]["head_dim"] == 64
    assert answer["shape"]["seqlen_q"] == answer["shape"]["seqlen_k"] == 512
    text = fagen(*words).out
    assert "forward_bf16_d64_causal" in text
    assert answer["tier_name"] in text
    assert answer["reason"] in text


def test_emit_prints_the_kernel_with_the_axes_that_were_set(fagen: Fagen) -> None:
    code, out, err = fagen(*EMIT, "--set", "block_n=48", "--set", "ping_pong=false")
    assert (code, err) == (0, "")
    assert re.search(r"kBlockN = 48\b", out)
    assert 'extern "C" __global__' in out


def test_emit_of_another_template(fagen: Fagen) -> None:
    out = fagen(*EMIT, "--set", "template=forward_sm80", "--set", "warps=8").out
    assert "forward_sm80" in out


def test_emit_writes_files(fagen: Fagen, tmp_path: Path) -> None:
    code, out, _ = fagen(*EMIT[:-1], str(tmp_path / "out"))
    assert code == 0
    paths = [Path(line) for line in out.splitlines()]
    assert {path.suffix for path in paths} >= {".cu", ".h"}
    assert all(path.read_text() for path in paths)


def test_doctor_finds_no_gpu_but_can_compile(fagen: Fagen) -> None:
    code, out, _ = fagen("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == 0
    assert findings["GPU"]["status"] == "warn"
    assert findings["NVRTC"]["status"] == "ok"
    text = fagen("doctor").out
    assert all(what in text for what in findings)


def test_doctor_says_that_nothing_can_be_kept(
    fagen: Fagen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_CACHE", "/proc/fagen")
    findings = {finding["what"]: finding for finding in json.loads(fagen("doctor", "--json").out)}
    assert findings["cache"]["status"] == "warn"
    assert "FAGEN_CACHE" in findings["cache"]["fix"]


def test_doctor_fails_where_nothing_can_be_compiled(
    fagen: Fagen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("FAGEN_CACHE", str(shared))
    code, out, _ = fagen("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == 1
    assert findings["cache"]["status"] == "fail"
    assert "FAGEN_CACHE" in findings["cache"]["fix"]


def test_check_counts_and_compiles(fagen: Fagen, tmp_path: Path) -> None:
    """On eight shipped records, the same at each run."""
    path = tmp_path / "some.yaml"
    save_records(path, random.Random(0).sample(load_records(shipped_path("sm90")).records, 8))
    code, out, _ = fagen(
        "check", "--arch", "sm90", "--sample", "3", "--json", "--config", str(path)
    )
    report = json.loads(out)
    assert code == 0
    assert report["ok"]
    assert len(report["records"]) == 8
    assert report["sample"]["compiled"] == 3
    for space in report["spaces"]:
        assert space["legal"] + sum(space["rejections"].values()) == space["points"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_shipped_record_compiles_without_a_fault(fagen: Fagen, arch: str) -> None:
    path = shipped_path(arch)
    code, out, _ = fagen("check", "--arch", arch, "--sample", "0", "--json", "--config", str(path))
    assert code == 0, out
    assert len(json.loads(out)["records"]) == len(load_records(path).records)


@pytest.fixture
def rechecked(monkeypatch: pytest.MonkeyPatch) -> list[TunedConfig]:
    """What `fagen recheck` asks about; a record of head dim 64 is stale, the rest holds."""
    asked: list[TunedConfig] = []

    def recheck(records: list[TunedConfig], worker: Worker, **_: Any) -> Iterator[Rechecked]:
        assert isinstance(worker, Worker)
        asked.extend(records)
        for record in records:
            stale = record.problem.head_dim == 64
            yield Rechecked(
                record=f"{record.problem} {record.bucket}",
                config=str(record.config),
                state="stale" if stale else "holds",
                reason="another is 3.0% faster" if stale else "",
                recorded_us=record.result.median_us,
                median_us=111.1,
            )

    monkeypatch.setattr("fagen.show.recheck.recheck", recheck)
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "query_device", lambda index: H200)
    return asked


@pytest.mark.parametrize("command", ["recheck", "verify"])
def test_recheck_says_of_each_record_whether_it_holds(
    fagen: Fagen, tmp_path: Path, rechecked: list[TunedConfig], command: str
) -> None:
    path = tmp_path / "records.yaml"
    problems = [
        Problem(dtype="bf16", head_dim=d, causal=c) for d in (64, 128) for c in (False, True)
    ]
    save_records(path, [some_record(p, default_config(p, H200)) for p in problems])
    words = (command, "--config", str(path))
    code, out, err = fagen(*words)
    assert (code, err) == (1, "")
    *lines, summary = out.splitlines()
    assert sum(line.startswith("stale") for line in lines) == 2
    assert all("another is 3.0% faster" in line for line in lines if line.startswith("stale"))
    assert all("123.4 us on record, now 111.1 us" in line for line in lines)
    assert summary == "4 records: 2 hold, 2 stale, 0 wrong"
    rechecked.clear()
    code, out, _ = fagen(*words, "--head-dim", "128", "--no-causal", "--dtype", "bf16", "--json")
    assert code == 0
    assert [record.problem for record in rechecked] == [problems[2]]
    assert [item["state"] for item in json.loads(out)] == ["holds"]


def test_cache_path_and_clear(
    fagen: Fagen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    assert fagen("cache", "path").out == f"{tmp_path / 'cache'}\n"
    assert fagen(*EMIT, "--format", "cubin").code == 0
    assert fagen("cache", "clear").out != "freed 0.0 MB\n"
    assert fagen("cache", "clear").out == "freed 0.0 MB\n"


# ---- tune ----


def _found(config: AnyConfig, time_us: float) -> Trial:
    return Trial(config, Measured(time_us=time_us))


@pytest.fixture
def scripted_tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A tune that tells a short story and is interrupted; holds the arguments of each call."""
    calls: list[dict[str, Any]] = []

    def scripted(tasks: list[Task], options: TuneOptions, *, on_event: OnEvent) -> TuneResult:
        calls.append({"tasks": tasks, **dict(options)})
        (task,) = tasks
        assert options.arch is not None
        shape, device = task.shapes[0], typical_device(options.arch)
        slow, fast = (_found(default_config(task.problem, device), us) for us in (200.0, 100.0))
        on_event(Notice("A notice [with brackets]."))
        removed = {"turns": 66, "smem": 8700}
        on_event(TaskStarted(task, 1, 1, "forward_sm90", device, 10_000, removed, 1234, 7))
        for done, tried in enumerate((slow, fast), 1):
            on_event(TrialDone(task.problem, shape, tried, tried, True, done, 50, {"wrong": 3}))
        on_event(ModelJudged(task.problem, shape, 0.934, 0.96, 40))
        on_event(ModelJudged(task.problem, shape, None, None, 1))  # which says nothing
        on_event(PhaseChanged(task.problem, "finish", gpu_busy=0.634))
        record = some_record(
            task.problem,
            fast.config,
            card=Card.of(device),
            median_us=100.0,
            tflops=123.0,
            speedup_over_default=1.5,
            speedup_over_torch=2.0,
        )
        on_event(RecordSaved(record, tmp_path / "own.yaml"))
        on_event(TaskDone(task.problem, {"enumerate": 2.0, "gpu": 240.0}))
        return TuneResult(
            records=(record,),
            path=tmp_path / "own.yaml",
            device=device,
            measured=True,
            storage="trials.journal",
            interrupted=True,
        )

    monkeypatch.setattr("fagen.tuning.tuner.tune", scripted)
    return calls


def test_interrupted_tune_keeps_the_best_and_says_how_to_go_on(
    fagen: Fagen, scripted_tune: list[dict[str, Any]]
) -> None:
    code, out, err = fagen(
        *TUNE, "--causal", "--budget", "2m", "--trials", "50", "--storage", "x y"
    )
    assert code == 130
    assert out.splitlines()[-1] == (
        f"interrupted; to continue: fagen {' '.join(TUNE)} --causal --budget 2m --trials 50"
        " --storage 'x y' --resume"
    )
    assert "own.yaml" in out
    assert "123" in out
    for said in (
        "1 problem, 1 shape,",
        "A notice [with brackets].",
        "[1/1] forward_bf16_d64_causal: 10,000 configs of forward_sm90, 1,234 of them legal; "
        "removed by rule: smem 8,700, turns 66; 7 known from earlier runs",
        "1 of 50: best 200.0 us",
        "2 of 50: best 100.0 us",
        "rejected: 3 wrong",
        "q512 k512 h32/32: rank correlation of the model with 40 measured: 0.93, 0.96 corrected",
        "final comparison; the GPU was busy 63% of the search",
        "measured 100.0 us, 123 TFLOP/s, 1.50x as fast as the default and 2.00x as fast as torch: ",
        "enumerate 2 s, gpu 4 min",
    ):
        assert said in err
    (options,) = scripted_tune
    assert options["budget_s"] == 120
    assert options["trials"] == 50
    assert options["storage"] == "x y"
    assert options["resume"] is False


def test_a_full_disk_is_one_line_and_exit_code_1(
    fagen: Fagen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise WriteError("cannot keep trials in x.journal: No space left on device")

    monkeypatch.setattr("fagen.tuning.tuner.tune", full)
    code, _, err = fagen(*TUNE)
    assert code == 1
    assert err.splitlines()[-1] == (
        "fagen: cannot keep trials in x.journal: No space left on device"
    )


def test_tune_ends_with_what_it_gained(
    fagen: Fagen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = Problem(dtype="bf16", head_dim=64)
    config = default_config(problem, H200)
    records = (
        some_record(problem, config, speedup_over_default=1.0, speedup_over_torch=3.0),
        some_record(problem, config, speedup_over_default=4.0),
    )
    result = TuneResult(records, tmp_path / "x.yaml", H200, measured=True, storage="x.journal")
    monkeypatch.setattr("fagen.tuning.tuner.tune", lambda *_, **__: result)
    assert fagen(*TUNE).out.splitlines()[-1] == (
        "2 kernels: 2.00x as fast as the default and 3.00x as fast as torch"
    )


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ((), [0]),
        (("--device", "2"), [2]),
        (("--device", "2,0,2"), [2, 0]),
        (("--device", "all"), [0, 2]),
        (("--device", "all", "--arch", "sm80"), [1]),
    ],
)
def test_tune_takes_several_cards(
    fagen: Fagen,
    monkeypatch: pytest.MonkeyPatch,
    scripted_tune: list[dict[str, Any]],
    words: tuple[str, ...],
    devices: list[int],
) -> None:
    cards = [H200, KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"], H200]
    monkeypatch.setattr(driver, "device_count", lambda: len(cards))
    monkeypatch.setattr(driver, "query_device", cards.__getitem__)
    fagen("tune", "--dtype", "bf16", "--head-dim", "64", "--causal", "--seqlen", "512", *words)
    assert scripted_tune[0]["devices"] == tuple(devices)


def test_tune_without_a_card_says_which_flags_have_no_effect(
    fagen: Fagen, scripted_tune: list[dict[str, Any]]
) -> None:
    err = fagen(*TUNE, "--causal", "--storage", "x", "--resume").err
    assert "Nothing is measured here, so these have no effect: --storage, --resume." in err
    assert scripted_tune


def _old_card_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(index: int) -> Device:
        if index == 0:
            raise UnsupportedError("Tesla V100 has compute capability 7.0")
        return H200

    monkeypatch.setattr(driver, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "driver_version", lambda: "13.0")
    monkeypatch.setattr(driver, "query_device", query)


def test_a_card_that_fagen_does_not_know_is_no_hindrance(
    fagen: Fagen, monkeypatch: pytest.MonkeyPatch, scripted_tune: list[dict[str, Any]]
) -> None:
    _old_card_first(monkeypatch)
    assert "H200" in fagen("explain", "--head-dim", "64").out
    fagen(*TUNE, "--causal")
    assert scripted_tune[0]["devices"] == (1,)
    code, _, err = fagen(*TUNE, "--device", "0")
    assert code == 2
    assert "the CUDA devices that fagen knows here: 1" in err


def test_doctor_reports_each_card(fagen: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    _old_card_first(monkeypatch)
    findings = {finding["what"]: finding for finding in json.loads(fagen("doctor", "--json").out)}
    assert findings["driver"]["found"] == "for CUDA 13.0"
    assert findings["GPU 0"]["status"] == "warn"
    assert "7.0" in findings["GPU 0"]["found"]
    assert findings["GPU 1"]["found"] == str(H200)


def test_tune_takes_no_other_card_than_the_one_that_is_named(
    fagen: Fagen, monkeypatch: pytest.MonkeyPatch, scripted_tune: list[dict[str, Any]]
) -> None:
    cards = [H200, KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"]]
    monkeypatch.setattr(driver, "device_count", lambda: len(cards))
    monkeypatch.setattr(driver, "query_device", cards.__getitem__)
    for chosen in ("1", "0,1"):
        code, _, err = fagen("tune", "--arch", "sm90", "--device", chosen)
        assert (code, len(err.splitlines())) == (2, 1)
        assert "--device 1: not an sm90 card" in err
    assert not scripted_tune


@pytest.mark.parametrize("heads_kv", ["--heads-kv", "--kv-heads"])
def test_tune_takes_several_problems(
    fagen: Fagen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, heads_kv: str
) -> None:
    seen: list[Task] = []

    def nothing(tasks: list[Task], options: TuneOptions, **_: Any) -> TuneResult:
        seen.extend(tasks)
        assert options.arch is not None
        device = typical_device(options.arch)
        return TuneResult((), tmp_path / "none.yaml", device, measured=False)

    monkeypatch.setattr("fagen.tuning.tuner.tune", nothing)
    words = "tune --arch sm_90a --dtype fp16 --dtype bf16 --head-dim 64 --head-dim 40"
    sizes = ("--seqlen", "100,1000", "--heads", "8", heads_kv, "2")
    code, out, _ = fagen(*words.split(), *sizes)
    assert (code, out) == (0, "")
    assert {(t.problem.dtype, t.problem.head_dim, t.problem.causal) for t in seen} == {
        (dtype, head_dim, causal)
        for dtype in ("fp16", "bf16")
        for head_dim in (64, 40)
        for causal in (False, True)
    }
    assert {(s.seqlen_q, s.heads_q, s.heads_kv) for t in seen for s in t.shapes} == {
        (100, 8, 2),
        (1000, 8, 2),
    }


def test_tune_searches_a_subspace(fagen: Fagen, scripted_tune: list[dict[str, Any]]) -> None:
    fagen(
        *TUNE,
        "--causal",
        "--set",
        "block_m=128",
        "--set",
        "block_n=64, 96,128",
        "--set",
        "overlap=true",
    )
    assert scripted_tune[0]["fixed"] == {
        "block_m": (128,),
        "block_n": (64, 96, 128),
        "overlap": (True,),
    }


def test_tune_takes_what_a_program_called(
    fagen: Fagen, scripted_tune: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "shapes.yaml"
    save_calls(path, [])
    code, _, err = fagen(*FROM, str(path))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "holds no calls" in err
    problem = Problem(dtype="fp16", head_dim=40, alignment=2)
    shape = Shape(batch=1, seqlen_q=7, seqlen_k=900, heads_q=8, heads_kv=2)
    save_calls(path, [Calls(problem=problem, shape=shape, calls=3, shape_calls=3)])
    code, out, _ = fagen(*FROM, str(path), "--trials", "50", "--budget", "2m", "--out", "o.yaml")
    (options,) = scripted_tune
    assert options["tasks"] == [Task(problem, (shape,))]
    assert (options["trials"], options["budget_s"], options["out"]) == (50, 120, Path("o.yaml"))
    assert code == 130
    assert f"--from {path} --trials 50" in out  # how to continue


def test_a_terminal_gets_a_bar(scripted_tune: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from fagen.cli.progress import TuneProgress
    from fagen.tuning.tasks import standard_tasks
    from fagen.tuning.tuner import tune

    console = Console(force_terminal=True, width=200, record=True, file=io.StringIO())
    with TuneProgress(console) as progress:
        tune(
            standard_tasks(dtypes=["bf16"], head_dims=[64], causal=[True], seqlens=[512]),
            TuneOptions(arch=architecture("sm90")),
            on_event=progress,
        )
        shown = console.export_text()
    assert "A notice [with brackets]." in shown
    assert "measured 100.0 us" in shown
    assert "of 50" not in shown


# ---- signals ----


def test_a_closed_pipe_is_quiet() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m fagen.cli emit --arch sm90 --dtype bf16"
         " --head-dim 64 -o - | head -1"],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["list", "list --json", "--help", " ".join(EMIT), "doctor"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="wants /dev/full")
def test_a_full_disk_is_one_line(command: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fagen.cli", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "fagen: cannot go on: No space left on device\n"
    assert done.returncode == 2


def test_a_closed_output_is_no_error() -> None:
    run = f"{shlex.quote(sys.executable)} -m fagen.cli list >&-"
    done = subprocess.run(["bash", "-c", run], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_is_exit_code_130(fagen: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fagen.show.doctor.diagnose", interrupted)
    code, out, err = fagen("doctor")
    assert code == 130
    assert "Traceback" not in out + err
