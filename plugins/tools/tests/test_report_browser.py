"""The page of runs in a real browser: zoom, filters, completions, themes, several runs, and a live page."""

from __future__ import annotations

import math
import re
import shutil
import threading

import pytest
from report_runs import HOSTILE, make_run, rollout

from engine_core.runs.tracking import write_rollouts
from engine_plugin_tools.report import write_report
from engine_plugin_tools.watch import watch_server

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="`make .venv/.browser` installs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium: `make .venv/.browser` installs it"),
]
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip


def lines(slope: float) -> list[dict]:
    return [
        {
            "reward/mean": slope * i,
            "actor/entropy": math.exp(-i / 50),
            "time/train": 1.0,
            "time/step": 1.5,
            "memory/rss_gib": 1.0,
        }
        for i in range(1, 101)
    ]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield running
        running.close()


@pytest.fixture
def open_page(browser):
    """Return ``open_page(address, **settings)``; the test fails if the page logs anything or loads more than itself."""
    problems, contexts = [], []

    def open_page(address, **settings):
        context = browser.new_context(viewport={"width": 1500, "height": 900}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: "503" in message.text or problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(address) or problems.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return two runs; the first has three steps of rollouts, the last one with 25 completions."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = (
        make_run(folder, lines(0.01), "first"),
        make_run(folder, [line | {"x" * 150: 1.0, "constructor": 2.0} for line in lines(0.005)], "second"),
    )
    for step, count in ((10, 1), (50, 2), (100, 25)):
        write_rollouts(first, step, [rollout(f"{i:02d} of {step} {HOSTILE}", float(i)) for i in range(count)])
    return first.path, second.path


@pytest.fixture
def page(open_page, runs):
    """Return the page of the first run."""
    return open_page(write_report(runs[:1]).as_uri())


def value(page, metric: str) -> str:
    return page.locator(f'[data-metric="{metric}"] .values').inner_text().replace("\n", " ")


def drag(page, metric: str, start: float, end: float) -> None:
    """Drag over a part of a panel; the cursor stays at its end."""
    box = page.locator(f'[data-metric="{metric}"] .u-over').bounding_box()
    place = [(box["x"] + box["width"] * share, box["y"] + box["height"] / 2) for share in (start, end)]
    page.mouse.move(*place[0])
    page.mouse.down()
    page.mouse.move(*place[1], steps=4)
    page.mouse.up()


def step_at(page, metric: str, share: float) -> int:
    """Return the step below the cursor at a share of a panel's width."""
    box = page.locator(f'[data-metric="{metric}"] .u-over').bounding_box()
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + 20)
    return int(re.search(r"step (\d+)", value(page, metric))[1])


def rewards(page) -> list[str]:
    return page.locator(".completion .reward").all_inner_texts()


def test_values_below_the_cursor_and_the_zoom_are_shared_by_all_panels(page):
    assert value(page, "reward/mean") == "1 last, step 100"
    middle = step_at(page, "reward/mean", 0.5)
    assert 45 <= middle <= 55
    assert value(page, "reward/mean") == f"{middle / 100:g} step {middle}"
    assert value(page, "actor/entropy").endswith(f"step {middle}")
    drag(page, "reward/mean", 0.2, 0.4)
    assert 15 <= step_at(page, "actor/entropy", 0.02) <= 25
    assert 35 <= step_at(page, "actor/entropy", 0.98) <= 45
    page.click("#reset")
    assert step_at(page, "actor/entropy", 0.98) > 95
    drag(page, "actor/entropy", 0.2, 0.4)
    page.locator('[data-metric="reward/mean"] .u-over').dblclick()
    assert step_at(page, "reward/mean", 0.98) > 95


def test_the_filter_hides_other_metrics_and_opens_their_groups(page):
    assert page.locator("#count").inner_text() == "5 of 5 metrics"
    assert not page.locator('[data-metric="time/step"]').is_visible()  # in a group that is closed at first
    page.fill("#filter", "time step")
    assert page.locator("#count").inner_text() == "1 of 5 metrics"
    assert page.locator('[data-metric="time/step"]').is_visible()
    assert page.locator(".panel[data-metric]:visible").count() == 1


def test_completions_are_paged_sorted_searched_and_filtered(page):
    assert page.locator(".facts .reward").first.inner_text() == "reward 0"
    assert page.locator("#range").inner_text() == "1 to 10 of 25"
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()
    assert page.locator("#range").inner_text() == "21 to 25 of 25"
    assert page.get_by_role("button", name="Next").is_disabled()
    page.select_option("#sort", "high")
    assert rewards(page)[:2] == ["reward 24", "reward 23"]
    page.select_option("#only", "wrong")
    assert rewards(page) == ["reward 0"]
    page.select_option("#only", "all")
    page.fill("#search", "07 OF")
    assert rewards(page) == ["reward 7"]


def test_another_step_has_its_own_histograms_and_completions(page):
    assert page.locator(".histograms canvas").count() == 3
    page.locator("#step").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#rollouts .bar").first.inner_text().replace("\n", " ").endswith("50 2 rollouts, 2 on this page")  # fmt: skip
    assert rewards(page) == ["reward 0", "reward 1"]
    page.keyboard.press("ArrowLeft")
    assert rewards(page) == ["reward 0"]


def test_hostile_text_is_shown_as_text(page):
    assert page.locator("#rollouts .text").nth(1).inner_text() == f"00 of 100 {HOSTILE}"
    assert page.locator("#rollouts img").count() == 0


def test_the_theme_follows_the_system_and_the_switch(open_page, runs):
    address = write_report(runs[:1]).as_uri()
    for system in ("dark", "light"):
        page = open_page(address, color_scheme=system)
        colors = []
        for _ in range(2):
            colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            page.click("#theme")
        dark, light = "rgb(15, 18, 23)", "rgb(245, 246, 248)"
        assert colors == ([dark, light] if system == "dark" else [light, dark])


@pytest.mark.parametrize("width", [390, 900, 1500])
def test_no_width_scrolls_sideways_and_a_phone_has_one_column(open_page, runs, width):
    page = open_page(write_report(runs).as_uri())
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    label = page.locator("#facts th", has_text="python").first
    assert label.bounding_box()["height"] < 40  # one line
    places = {round(each.bounding_box()["x"]) for each in page.locator(".top .panel").all()}
    assert (len(places) == 1) == (width == 390)
    assert all(each.bounding_box()["width"] > 250 for each in page.locator(".top .u-over").all())


def test_two_runs_have_a_line_each_and_a_legend_with_names(open_page, runs):
    page = open_page(write_report(runs).as_uri())
    assert value(page, "reward/mean").split() == ["first", "1", "second", "0.5"]
    assert page.locator(".run .badge").count() == 2
    assert page.locator(".completion").count() == 10
    page.select_option("#run", "1")
    assert "has stored no rollouts" in page.locator("#rollouts").inner_text()


def test_a_live_page_shows_new_steps_and_keeps_its_zoom(open_page, tmp_path):
    run = make_run(tmp_path, lines(0.01), "live")
    write_rollouts(run, 1, [rollout("seen", 1.0)])
    with watch_server([run.path], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = open_page(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_selector(".completion")
        drag(page, "reward/mean", 0.2, 0.4)
        page.mouse.move(0, 0)
        with run.metrics_file.open("a") as file:
            file.write('{"step": 150, "reward/mean": 2.0, "new/metric": 1.0}\n')
        page.wait_for_selector('[data-metric="new/metric"]', state="attached")
        assert value(page, "reward/mean") == "2 last, step 150"
        assert 35 <= step_at(page, "reward/mean", 0.98) <= 45
        page.click("#reset")
        assert step_at(page, "reward/mean", 0.98) > 100
        page.locator("summary", has_text="config.resolved.toml").click()
        page.locator("#search").press_sequentially("se")
        write_rollouts(run, 2, [rollout("seen later", 1.0)])
        page.wait_for_selector('.completion >> text="seen later"')
        page.keyboard.type("en l")  # the field keeps the focus
        assert page.locator("#search").input_value() == "seen l"
        assert page.locator("#facts pre").is_visible()  # and what is open stays open
        run.metrics_file.write_text('{"step": 1, "reward/mean": 0.01}\n')  # as a resume from step 1 does
        page.wait_for_selector('[data-metric="new/metric"]', state="detached")
        assert value(page, "reward/mean") == "0.01 last, step 1"
        shutil.rmtree(run.path)
        page.wait_for_selector('#live >> text="the runs cannot be read"')
        server.shutdown()
