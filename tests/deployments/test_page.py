"""The page at `/` in a real browser, against one live server with a tiny model.

After every test: no request has left this machine, nothing was refused by the page's own policy,
and the console says of no error.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.support.choices import by_day
from tests.support.deployments.server import Server, serving, tiny_config
from tests.support.local_models import drafters
from tests.support.page.browser import Page, browser
from tests.support.page.hostile import HOSTILE
from tests.support.page.pictures import with_palette
from tests.support.page.traces import traced

TABS = ("chat", "race", "tree", "timeline", "figures")
# A server to take the pictures of docs/screenshots of.
PHOTOGRAPHED = os.environ.get("DRAFTHOUSE_PHOTOGRAPH")
SCREENSHOTS = Path(__file__).resolve().parents[2] / "docs/screenshots"


@pytest.fixture(scope="module")
def chrome() -> Iterator[webdriver.Chrome]:
    with browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def server(
    chrome: webdriver.Chrome, checkpoint_factory: Callable[..., Path], draft_folder: Path
) -> Iterator[Server]:
    """Of a model that its drafter knows, with room for conversations."""
    config = tiny_config(checkpoint_factory("llama", max_position_embeddings=4096))
    engine = replace(config.target.engine, max_context_len=4096, num_pages=1024)
    own = {name: drafters(draft_folder)[name] for name in ("lm", "lookup")}
    config = replace(config, target=replace(config.target, engine=engine), drafters=own)
    with serving(config) as found:
        yield found


@pytest.fixture
def page(chrome: webdriver.Chrome, server: Server) -> Iterator[Page]:
    page = Page(chrome, server.url)
    page.see(1280, "light", motion="reduce")
    page.open()
    yield page
    foreign = [
        url for _, url in page.requests() if not url.startswith((server.url, "blob:", "data:"))
    ]
    assert foreign == []
    assert page.errors() == []


def race(page: Page, prompt: str = "Say something.") -> None:
    """Ask twice, and wait for what came of it."""
    page.find("#race-prompt").clear()
    page.find("#race-prompt").send_keys(prompt)
    page.click("#race .go")
    page.wait(lambda: page.count("#race .ratio"))


def ask(page: Page, prompt: str) -> None:
    page.click("#tab-chat")
    page.find("#chat-prompt").send_keys(prompt)
    page.click("#chat .go")
    page.wait(lambda: page.count(".said") and page.text("#chat .go") == "Ask")


def test_a_visitor_sees_the_model_a_recording_and_a_question(page: Page):
    assert "tiny drafted by" in page.text("#who")
    assert "lookup" in page.text("#who")
    assert "A recording of SmolLM2" in page.text(".recording")
    assert page.count(".recording svg.tree .node") > 4
    assert page.find("#race-prompt").get_attribute("value")
    assert page.find("#race .go").text == "Same text, twice: with drafts and without"


def test_the_same_text_twice_ends_in_a_ratio_and_equal_tokens(page: Page):
    race(page)
    assert re.fullmatch(r"\d+\.\d\d.", page.text(".ratio strong"))
    total = page.text(".same").split()[1]
    assert int(total) > 1
    assert page.text(".same") == f"✓ {total} of {total} tokens equal"
    drafted, plain = (
        one.text for one in page.driver.find_elements("css selector", ".lane .answer")
    )
    assert drafted == plain != ""
    # Screen readers hear sentences.
    assert page.find("#spoken").get_attribute("aria-live") == "polite"
    assert page.count("#spoken p") > 0
    assert "tokens equal" in page.text("#race .status")
    assert page.count(".lane:first-child .token") > 0
    assert page.count(".lane:last-child .token") == 0
    assert "lm" in page.text(".shares")
    # The steps are there, and in the tab of their own.
    page.click("#tab-tree")
    before = page.text("#tree .caption")
    page.find("#tree input[type=range]").send_keys(Keys.ARROW_RIGHT)
    assert page.text("#tree .caption") != before
    page.click("#tree summary")
    page.wait(lambda: page.count("#tree .tree-list"))
    assert "own token" in page.text("#tree .tree-list")


def test_where_drafts_are_not_allowed_the_page_says_why(page: Page):
    trace = traced("plain")
    trace["answers"][0]["stats"] = {"idle_because": "not_worth_it", "decode_time_s": 2}
    open_trace(page, trace)
    assert "would have cost more than it saves" in page.text(".verdict .why")
    assert page.text(".ratio strong")[:-1] == "0.50"


def test_a_conversation_goes_on_and_is_rendered_on_demand(page: Page):
    ask(page, "First.")
    ask(page, "Second.")
    assert page.count(".asked") == page.count(".said") == 2
    assert "tokens" in page.text(".said .note")
    page.click(".said button")
    assert page.count(".said .rendered") == 1


GONE = """
const [done] = arguments;
import("/ui/static/figures.js").then(({ Figures }) => {
  const figures = new Figures(document.createElement("div"), { listen() {} });
  const tell = (coordinator, running) => figures.take("state", { coordinator, running });
  const sum = () => figures.all("state").reduce((total, state) => total + state.running, 0);
  const now = performance.now();
  performance.now = () => now;
  tell("old", 1);
  tell("new", 2);
  const before = sum();
  performance.now = () => now + 60000;
  tell("new", 2);
  done([before, sum()]);
});
"""
ANSWER = """
window.asked = [];
window.fetch = async (path, { body, signal }) => {
  asked.push(JSON.parse(body));
  const choices = [{ delta: { reasoning_content: "Hm. ", content: "Yes." } }];
  return new Response(`data: ${JSON.stringify({ choices })}\n\ndata: [DONE]\n\n`);
};
"""


def test_reasoning_is_shown_and_not_sent_again(page: Page):
    page.run(ANSWER)
    ask(page, "First.")
    ask(page, "Second.")
    assert page.text(".said .answer") == "Hm. Yes."
    assert page.run("return asked[1].messages[1].content") == "Yes."


def test_a_conversation_that_is_opened_meanwhile_stays_as_it_is(page: Page):
    page.click("#tab-chat")
    page.find("#chat-prompt").send_keys("First.")
    page.run(
        "for (const each of ['.go', '.quiet']) document.querySelector('#chat ' + each).click()"
    )
    page.wait(lambda: page.text("#chat .go") == "Ask")
    assert page.count("#chat .log .note") == 1
    assert page.find("#chat-prompt").get_attribute("value") == ""


def test_a_trace_that_is_opened_meanwhile_stays_as_it_is(page: Page):
    page.click("#race .go")
    open_trace(page, traced("plain"))
    page.wait(lambda: page.text("#race .go") != "Stop")
    assert page.text("#race .status").endswith("cost nothing; 2 of 2 tokens equal.")


def test_a_coordinator_that_has_gone_counts_no_more(page: Page):
    counted = page.driver.execute_async_script(GONE)
    assert counted == [3, 2]


def test_what_is_saved_opens_without_any_server(page: Page, tmp_path: Path):
    allowed = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)
    race(page)
    shown = page.text("#race .verdict")
    page.click("#save-trace")
    trace = saved(page, tmp_path, "trace")
    ask(page, "A question.")
    page.click("#save-chat")
    chat = saved(page, tmp_path, "conversation")
    page.open()
    page.requests()
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        page.open_file(trace)
        page.wait(lambda: page.text("#race .verdict") == shown)
        page.open_file(chat)
        page.wait(lambda: page.count(".said") == 1)
        assert page.text(".asked p") == "A question."
        assert page.requests() == []
    finally:
        page.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            offline | {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1},
        )


def test_twenty_hostile_answers_stay_inert(page: Page, tmp_path: Path):
    assert len(HOSTILE) == 20
    messages = [
        {"role": role, "content": text} for text in HOSTILE for role in ("user", "assistant")
    ]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"drafthouse": "conversation", "version": 1, "messages": messages}))
    page.open_file(path)
    page.wait(lambda: page.count(".said") == 20)
    check_inert(page)
    page.run("document.querySelectorAll('.said button').forEach((button) => button.click())")
    assert page.count(".rendered") == 20
    check_inert(page)
    for text in HOSTILE:
        open_trace(page, traced(text))
        page.click("#tab-tree")
        check_inert(page)
        assert page.find("#race .go").get_attribute("type") == "submit"


def test_a_file_that_says_nothing_does_no_harm(page: Page, tmp_path: Path):
    path = tmp_path / "bad.json"
    for content in ("{", "[]", '{"drafthouse": "other"}', '{"drafthouse": "trace"}'):
        path.write_text(content)
        page.open()
        page.open_file(path)
        page.wait(
            lambda: page.find("#alert").is_displayed() or page.text("#race .status") == "0 tokens"
        )


def test_axe_finds_nothing(page: Page):
    race(page)
    ask(page, "A question.")
    page.click("#tab-figures")
    page.wait(lambda: page.count(".chart canvas") and page.count("#figures tbody tr"))
    page.click("#tab-race")
    # All tabs at once, which takes a fifth of the time.
    page.run(
        "document.querySelectorAll('[role=tabpanel]').forEach((one) => { one.hidden = false })"
    )
    every = list(product((360, 1280), ("light", "dark")))
    for width, scheme in by_day(every[1:3], every):
        page.see(width, scheme, motion="reduce")
        assert page.axe() == [], (width, scheme)
        assert page.run("return document.documentElement.scrollWidth") <= width


def test_keys_reach_every_tab(page: Page):
    page.find("#tab-race").send_keys(Keys.HOME)
    for name in TABS:
        focused = page.run("return document.activeElement.id")
        assert focused == f"tab-{name}"
        assert [tab for tab in TABS if page.find(f"#{tab}").is_displayed()] == [name]
        page.find(f"#tab-{name}").send_keys(Keys.ARROW_RIGHT)
    assert page.run("return document.activeElement.id") == "tab-chat"


def test_the_timeline_and_the_figures_show_the_cluster_at_work(page: Page):
    race(page)
    page.click("#tab-timeline")
    assert "tokens in" in page.find("#timeline canvas").get_attribute("aria-label")
    page.click("#tab-figures")
    page.wait(lambda: page.count(".chart canvas") and "lookup" in page.text("#figures tbody"))
    assert any("uplot.js" in url for _, url in page.requests())


def test_the_figures_say_what_two_rows_of_one_drafter_and_task_differ_in(
    page: Page, server: Server
):
    for temperature in (0, 1):
        server.complete(
            prompt=[9, 8, 7] * 8, max_tokens=32, ignore_eos=True, temperature=temperature
        )
    page.click("#tab-figures")

    def rows() -> list[tuple[str, ...]]:
        cells = "(row) => [...row.children].slice(0, 4).map((cell) => cell.textContent)"
        table = "#figures .two .card:last-child tbody tr"
        found = page.run(f"return [...document.querySelectorAll('{table}')].map({cells})")
        return list(map(tuple, found))

    page.wait(lambda: {"greedy", "sampled"} <= {texts for _, _, texts, _ in rows()})
    found = rows()
    assert len(set(found)) == len(found)


def test_motion_waits_for_those_who_want_it(page: Page):
    assert page.text(".recording .film-bar button") == "Play"
    page.see(1280, "light")
    page.open()
    page.wait(lambda: page.text(".recording .film-bar button") == "Pause")
    first = page.text(".recording .caption")
    page.wait(lambda: page.text(".recording .caption") != first)


def test_a_link_asks_nothing(page: Page):
    page.requests()
    page.open("/?prompt=hello&ask=1&preset=2#race")
    assert {method for method, _ in page.requests()} == {"GET"}
    assert page.count(".ratio") == 0


@pytest.mark.skipif(not PHOTOGRAPHED, reason="DRAFTHOUSE_PHOTOGRAPH names no server")
def test_pictures_for_the_docs(chrome: webdriver.Chrome):
    page = Page(chrome, str(PHOTOGRAPHED))
    SCREENSHOTS.mkdir(exist_ok=True)
    for width in (1280, 360):
        for scheme in ("light", "dark"):
            page.see(width, scheme, motion="reduce")
            page.open()
            page.click("#tab-tree")
            photograph(page, width, f"tree-{scheme}-{width}")
            page.click("#tab-race")
            page.click("#race .go")
            page.wait(lambda: page.count("#race .ratio"))
            photograph(page, width, f"race-{scheme}-{width}")


def photograph(page: Page, width: int, name: str) -> None:
    """Write a picture of the whole page."""
    height = page.run(
        "scrollTo(0, 0); return document.querySelector('footer').getBoundingClientRect().bottom"
    )
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    asked = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    picture = page.driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"]
    (SCREENSHOTS / f"{name}.png").write_bytes(with_palette(page.driver, picture))


def saved(page: Page, folder: Path, name: str) -> Path:
    page.wait(lambda: list(folder.glob(f"{name}-*.json")))
    return next(folder.glob(f"{name}-*.json"))


def open_trace(page: Page, trace: dict[str, Any]) -> None:
    script = """
    const file = new File([arguments[0]], "trace.json");
    const transfer = new DataTransfer();
    transfer.items.add(file);
    document.querySelector("#race .verdict")?.replaceChildren();
    document.querySelector("#file").files = transfer.files;
    document.querySelector("#file").dispatchEvent(new Event("change"));
    """
    page.run(script, json.dumps(trace))
    page.wait(lambda: page.count("#race .ratio"))


def check_inert(page: Page) -> None:
    """Nothing ran, and nothing that a model said is more than text, lists and links."""
    found = page.run("""
    const said = [...document.querySelectorAll(".answer *, .asked *, .tree-list *, .caption *")];
    const tags = ["SCRIPT", "IMG", "IFRAME", "OBJECT", "EMBED", "FORM", "INPUT", "STYLE", "LINK",
      "META", "BASE", "SVG", "MATH"];
    return {
      ran: window.ran ?? null,
      tags: said.filter((one) => tags.includes(one.tagName.toUpperCase())).length,
      handlers: said.filter((one) => [...one.attributes].some(
        ({ name }) => name.startsWith("on") || ["style", "id", "name"].includes(name))).length,
      links: said.filter((one) => one.hasAttribute("href") && !/^https?:/.test(one.href)).length,
      turned: [...document.querySelectorAll(".tree text")].filter(
        (one) => /[\\u202a-\\u202e\\u2066-\\u2069]/.test(one.textContent)).length,
      tabs: document.querySelectorAll("[role=tab]").length,
    };
    """)
    assert found == {"ran": None, "tags": 0, "handlers": 0, "links": 0, "turned": 0, "tabs": 5}
