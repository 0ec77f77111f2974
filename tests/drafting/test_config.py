"""Configuration refuses unknown keys, and importing the package is cheap."""

from __future__ import annotations

import os
import sys
from ctypes.util import find_library

import pytest
from fresh_process import python

from redrafter_mlx import BLAS, errors
from redrafter_mlx.config import MIN_TEMPERATURE, BeamShape, GenerationOptions
from redrafter_mlx.cpu.blas import THREAD_VARIABLES
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.errors import BadInputError, RedrafterError


def test_importing_the_package_imports_no_mlx() -> None:
    heavy = "('mlx.core', 'mlx_lm', 'transformers', 'numpy', 'typer', 'rich')"
    code = f"import redrafter_mlx, sys; print([m for m in {heavy} if m in sys.modules])"
    assert python(code) == "[]"


def test_every_public_name_exists() -> None:
    python("import redrafter_mlx as r\nfor n in r.__all__: getattr(r, n)")


def test_an_unknown_name_is_an_attribute_error() -> None:
    code = "import redrafter_mlx as r\ntry: r.nothing\nexcept AttributeError as e: print(e)"
    assert "nothing" in python(code)


@pytest.mark.skipif(sys.platform != "linux", reason="BLAS is chosen on Linux only")
def test_the_blas_can_be_refused_and_a_missing_one_is_reported() -> None:
    show = "import redrafter_mlx; print(redrafter_mlx.BLAS.library, redrafter_mlx.BLAS.note)"
    refused = python(show, REDRAFTER_BLAS="none")
    assert refused.startswith("None ")
    assert "REDRAFTER_BLAS=none" in refused
    assert "libnothing.so" in python(show, REDRAFTER_BLAS="libnothing.so")
    late = "import mlx.core, redrafter_mlx; print(redrafter_mlx.BLAS.note)"
    assert "too late" in python(late)


@pytest.mark.skipif(BLAS.library is None, reason="no optimised BLAS is loaded")
def test_the_blas_that_is_named_is_in_the_process() -> None:
    code = (
        "import redrafter_mlx\n"
        "name = redrafter_mlx.BLAS.library\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(name.split('/')[-1].split('.so')[0] in maps)\n"
    )
    assert python(code) == "True"


@pytest.mark.skipif(
    sys.platform != "linux" or find_library("gomp") is None, reason="needs GNU's OpenMP"
)
@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "passive"}])
def test_threads_wait_awake_between_products_unless_the_environment_says_how(
    given: dict[str, str],
) -> None:
    code = (
        "import os\n"
        "os.dup2(1, 2)  # where OpenMP prints its settings\n"
        "import redrafter_mlx\n"
        "print(*(os.environ.get(n) for n in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')))"
    )
    shown = python(code, REDRAFTER_BLAS="libgomp.so.1", OMP_DISPLAY_ENV="verbose", **given)
    policy = given.get("OMP_WAIT_POLICY")
    assert f"OMP_WAIT_POLICY = '{(policy or 'active').upper()}'" in shown
    assert ("GOMP_SPINCOUNT = '300000'" in shown) == (policy is None)
    assert shown.endswith(f"{policy} None")  # not for other libraries and child processes


@pytest.mark.skipif(BLAS.library is None, reason="no optimised BLAS is loaded")
@pytest.mark.parametrize("given", ["", "1"])
@pytest.mark.parametrize("longer", [0.9, 1.1, 1.3])
def test_few_rows_leave_a_core_where_that_is_as_fast_unless_the_environment_names_threads(
    given: str, longer: float
) -> None:
    code = (
        "import ctypes, redrafter_mlx as r, redrafter_mlx.cpu.threads as blas\n"
        "lib = ctypes.CDLL(r.BLAS.library)\n"
        "mkl = hasattr(lib, 'MKL_Get_Max_Threads')\n"
        "count = lib.MKL_Get_Max_Threads if mkl else lib.openblas_get_num_threads\n"
        f"blas.slowdown = lambda *_: {longer}\n"
        "seen = []\n"
        "for rows in (1, 2, 4, 5): blas.THREADS.prepare_for(rows); seen.append(count())\n"
        "blas.THREADS.use_all_cores(); print(*seen, count())"
    )
    cores = 1 if given else len(os.sched_getaffinity(0))
    few = max(1, cores - 1) if longer < 1.2 else cores
    threads = dict.fromkeys(THREAD_VARIABLES, given)
    assert python(code, **threads) == f"{cores} {few} {few} {cores} {cores}"


@pytest.mark.skipif(BLAS.library is None, reason="no optimised BLAS is loaded")
@pytest.mark.parametrize(("seconds", "repeats"), [(2.0, 4), (1.2, 8), (0.9, 8)])
def test_a_product_that_needs_all_cores_is_timed_less_often_than_one_that_does_not(
    seconds: float, repeats: int
) -> None:
    """Other work can make it seem so that it does not."""
    code = (
        "import ctypes, time, redrafter_mlx as r, redrafter_mlx.cpu.threads as blas\n"
        "class Clock:\n"
        "    now = lag = 0.0\n"
        "    def perf_counter(self): self.now += self.lag; return self.now\n"
        "blas.time, used = Clock(), []\n"
        "def use(name, lag): used.append(name); blas.time.lag = lag\n"
        "library = ctypes.CDLL(r.BLAS.library)\n"
        f"ratio = blas.slowdown(library, lambda: use('few', {seconds}), lambda: use('all', 1))\n"
        "print(round(ratio, 2), len(used), *used[:3])"
    )
    assert python(code) == f"{seconds} {2 * repeats} few all few"


@pytest.mark.skipif(BLAS.library is None, reason="no optimised BLAS is loaded")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core")
def test_products_faster_than_the_clock_tells_are_measured_once_and_are_no_error() -> None:
    code = (
        "import redrafter_mlx as r, redrafter_mlx.cpu.threads as threads\n"
        "class Clock:\n"
        "    reads = 0\n"
        "    def perf_counter(self): self.reads += 1; return 1.0\n"
        "threads.time = clock = Clock()\n"
        "found = threads.Threads(r.BLAS.library)\n"
        "spares = [found.spares_a_core for _ in range(3)]\n"
        "print(*spares, clock.reads)"
    )
    unset = dict.fromkeys(THREAD_VARIABLES, "")
    assert python(code, **unset) == "True True True 32"


@pytest.mark.skipif(BLAS.library is None, reason="no optimised BLAS is loaded")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core")
def test_a_core_left_to_the_host_on_a_busy_machine_is_taken_back_once_it_is_missed() -> None:
    """Where it is never missed, that is asked ever more seldom."""
    code = (
        "import redrafter_mlx as r, redrafter_mlx.cpu.threads as threads\n"
        "def uses(measured, times):\n"
        "    found, seen, given = threads.Threads(r.BLAS.library), [], iter(measured)\n"
        "    threads.slowdown = lambda *_: seen.append('measured') or next(given)\n"
        "    for _ in range(times):\n"
        "        with found.by_rows(): pass\n"
        "    return len(seen), found.spares_a_core\n"
        "print(*uses([0.95, 1.9], 99), *uses([1.9], 99), *uses([1.0] * 99, 64))"
    )
    unset = dict.fromkeys(THREAD_VARIABLES, "")
    assert python(code, **unset) == "2 False 1 False 7 True"


@pytest.mark.skipif(BLAS.library is None, reason="no optimised BLAS is loaded")
def test_the_threads_for_few_rows_are_found_before_an_engine_computes_anything() -> None:
    """Its first products, still in flight, would take a core from those that are timed."""
    code = (
        "import redrafter_mlx as r, redrafter_mlx.cpu.threads as blas\n"
        "from redrafter_mlx.engine.thread import EngineThread\n"
        "seen = []\n"
        "blas.slowdown = lambda *_: seen.append('timed') or 2.0\n"
        "EngineThread().run(lambda: seen.append('computed'))\n"
        "print(*seen)"
    )
    cores = len(os.sched_getaffinity(0))
    unset = dict.fromkeys(THREAD_VARIABLES, "")
    assert python(code, **unset) == ("computed" if cores == 1 else "timed computed")


def test_unknown_keys_are_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(BadInputError, match="'beam_widht'; did you mean 'beam_width'"):
        GenerationOptions().updated({"beam_widht": 3})
    with pytest.raises(BadInputError, match="'exit_dims'; did you mean 'exit_dim'"):
        DrafterConfig.from_dict({"exit_dims": 3})


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    options = GenerationOptions(temperature=0.5).updated({"beam_width": 3, "stop": "x"})
    assert (options.temperature, options.beam_width, options.stop) == (0.5, 3, ("x",))


def test_a_shape_holds_every_node_its_beams_can_have() -> None:
    assert BeamShape(4, 4).nodes == 13
    assert BeamShape(4, 4, 7).nodes == 7
    assert BeamShape(1, 1).nodes == 1


def test_every_error_of_ours_is_caught_by_one_name() -> None:
    ours = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(ours) > 5
    assert all(issubclass(e, RedrafterError) for e in ours)
    assert issubclass(BadInputError, ValueError)


@pytest.mark.parametrize("temperature", [1e-8, 9e-5, 5e-324, -0.0])
def test_a_temperature_too_low_to_draw_at_is_greedy(temperature: float) -> None:
    assert GenerationOptions(temperature=temperature).method == "greedy"
    assert GenerationOptions(temperature=MIN_TEMPERATURE).method == "sample"
