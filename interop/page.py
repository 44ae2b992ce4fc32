#!/usr/bin/env python3
"""The brain's page in a real browser: it clicks through the page and checks what appears.

The server is the example `web_fixture` of the crate `cluster`: the real server over figures that move. The browser is
headless Chromium. Every part also demands that the page complains of nothing: no error on its console, no exception, no
breach of its content security policy.

Exit status: 0 all parts passed, 1 a part failed, 2 usage, 77 skipped with the reason on stdout.

Examples:
  python3 interop/page.py
  python3 interop/page.py --only hostile
  python3 interop/page.py --pictures docs/pictures
"""

import argparse
import pathlib
import re
import subprocess
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import browser
import lab

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKEN = "a-token-of-the-page-test"
HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>document.title='taken'</script>",
           "\"' onmouseover='alert(2)' & <b>bold</b>", "javascript:alert(3)//\\u202egnp.exe"]


class Fixture:
    """The server, as a process. Use it in a `with` statement."""

    def __init__(self, program, *options):
        self.command = [str(program), *options]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        if not self.url.startswith("http://"):
            raise browser.Failed(f"{self.command} did not start")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    @property
    def address(self):
        return re.search(r"//([^/]+)/", self.url)[1]


def expect(condition, what):
    if not condition:
        raise browser.Failed(what)


def rows(page, section):
    """The cells of a table, as they are read."""
    return page.run(f"[...document.querySelectorAll('#{section} tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))")


def loaded(page, url):
    page.open(url)
    page.until("document.querySelectorAll('#jobs tbody tr').length > 0", "the table of jobs has rows")


def quiet(page):
    complaints = page.complaints()
    expect(not complaints, f"the page complains: {complaints}")


def overview(page, program):
    """The table, the map, alarms and events of a cluster that works."""
    with Fixture(program) as server:
        loaded(page, server.url)
        expect(page.text("#state") == "Leading, term 3", page.text("#state"))
        jobs = rows(page, "jobs")
        expect([job[0] for job in jobs] == ["llama-70b-pretrain", "vision-moe", "rl-rollouts", "checkpoint-copy"], jobs)
        expect(jobs[0][1:6] == ["team-language", "running", "16", "4", "10"], jobs[0])
        expect(jobs[3][2] == "degraded", jobs[3])
        expect(page.text("#size") == "8 hosts, 6 switches, 32 directed links", page.text("#size"))
        drawn = page.run("['.node', '.link', '.link.short'].map(what => document.querySelectorAll('#graph ' + what).length)")
        expect(drawn == [14, 32, 8], f"nodes, links, short links: {drawn}")
        expect("Error: job 4 gets" in page.text("#alarms"), page.text("#alarms"))
        expect("systemctl status" in page.text("#alarms .hint"), "an alarm has a hint")
        page.until("document.querySelectorAll('#events li').length >= 6", "events arrive")
        before = page.run("document.querySelectorAll('#events li').length")
        page.until(f"document.querySelectorAll('#events li').length > {before}", "events arrive while the page is open")
        used = rows(page, "jobs")[0][7]
        page.until(f"document.querySelector('#jobs tbody tr').cells[7].innerText !== {used!r}", "figures move")
        quiet(page)


def clicks(page, program):
    """A job, a link, the link's other direction, and a node, with the mouse."""
    with Fixture(program) as server:
        loaded(page, server.url)
        page.click_on("document.querySelector('#jobs tbody tr:nth-child(2) button')")
        page.until("document.querySelector('#body h3')?.innerText === 'vision-moe'", "the job is shown")
        detail = page.text("#body")
        for part in ("team-vision", "all-to-all(4)", "host-1", "ranks 0 to 1", "host-5", "24.0 Gbit/s",
                     "exchanges for 7 ms of each 24 ms, beginning 11 ms after each multiple of 24.1 ms of Unix time, in turn with llama-70b-pretrain"):
            expect(part in detail, f"{part} is not in {detail}")
        lit = page.run("[...document.querySelectorAll('.node.on')].map(node => node.querySelector('text').textContent)")
        expect({"host-1", "host-3", "host-4", "host-5"} <= set(lit) and "host-0" not in lit and "host-7" not in lit, lit)
        links = page.run("[document.querySelectorAll('.link.on').length, document.querySelectorAll('.link').length]")
        expect(0 < links[0] < links[1], links)
        expect(all(row[2] == "vision-moe" for row in rows(page, "ports")), "queues are those of the job")

        # A quarter of the way along the line from host-7 up.
        page.click(*page.run("(() => { const hit = document.querySelectorAll('.hit')[14]; const p = hit.getPointAtLength(hit.getTotalLength() / 4);"
                             " const q = p.matrixTransform(hit.getScreenCTM()); return [q.x, q.y]; })()"))
        page.until("document.querySelector('#body h3')?.innerText === 'host-7 \\u2192 leaf-3'", "the link is shown")
        detail = page.text("#body")
        for part in ("a job gets less than it reserved", "10.0 Gbit/s, 10 % of 100 Gbit/s", "checkpoint-copy", "2.00 MiB", "queue 4, paced at 10.0 Gbit/s"):
            expect(part in detail, f"{part} is not in {detail}")
        page.until("(document.querySelector('.spark .used')?.getAttribute('d') ?? '').split('L').length > 2", "the history is drawn")
        page.click_on("[...document.querySelectorAll('#body button')].find(button => button.innerText === 'Other direction')")
        page.until("document.querySelector('#body h3')?.innerText === 'leaf-3 \\u2192 host-7'", "the other direction is shown")

        page.click_on("document.querySelectorAll('.node')[7].querySelector('rect')")
        page.until("document.querySelector('#body h3')?.innerText === 'host-7'", "the node is shown")
        expect("silent" in page.text("#body") and "its last plan stays in force" in page.text("#body"), page.text("#body"))
        page.click_on("document.querySelector('#clear')")
        page.until("!document.querySelector('#body h3') && !document.querySelector('.faded')", "nothing is selected")
        page.click_on("document.querySelector('#jobs tbody tr:nth-child(3) button')")
        page.until("document.querySelector('#body')?.innerText.includes('whenever it likes: it fills no link together with other jobs that say their cycle')", "it has no time")
        quiet(page)


def keyboard(page, program):
    """The same without a mouse, and nothing on the page moves by it."""
    with Fixture(program) as server:
        loaded(page, server.url)
        places = "JSON.stringify([...document.querySelectorAll('section')].map(section => Object.values(section.getBoundingClientRect().toJSON())))"
        before = page.run(places)
        page.key("Tab", 9)
        expect(page.run("document.activeElement.id") == "graph", "the map is the first stop")
        page.key("ArrowRight", 39)
        page.until("document.querySelector('#body h3')?.innerText === 'host-1'", "an arrow selects the next node")
        page.key("ArrowDown", 40)
        page.until("document.querySelector('#body h3')?.innerText.includes('\\u2192')", "an arrow reaches the links")
        page.key("Escape", 27)
        page.until("!document.querySelector('#body h3')", "Escape clears")
        page.run("document.querySelector('#jobs tbody tr:nth-child(3) button').focus()")
        page.key("Enter", 13, "\r")
        page.until("document.querySelector('#body h3')?.innerText === 'rl-rollouts'", "Enter selects a job")
        time.sleep(2.5)
        expect(page.run("document.activeElement.innerText") == "rl-rollouts", "the focus stays while the table is refreshed")
        expect(page.run(places) == before, "the layout moved")
        quiet(page)


def hostile(page, program):
    """Job names that are HTML, script and invisible letters are text."""
    with Fixture(program, "--hostile") as server:
        loaded(page, server.url)
        names = [job[0] for job in rows(page, "jobs")]
        expect(names == HOSTILE, f"names are not literal: {names}")
        for number in range(4):
            page.click_on(f"document.querySelector('#jobs tbody tr:nth-child({number + 1}) button')")
            page.until(f"document.querySelector('#body h3')?.textContent === {HOSTILE[number]!r}", "the name is shown as it is")
        page.until("document.querySelectorAll('#events li').length >= 6", "events arrive")
        expect(page.run("document.images.length + document.querySelectorAll('section b, body script ~ script').length") == 0, "markup came to life")
        expect("taken" not in page.run("document.title"), "a script ran")
        policy = ("(() => { const made = document.createElement('script'); made.textContent = 'window.broken = true';"
                  " document.body.append(made); return window.broken === undefined; })()")
        quiet(page)
        expect(page.run(policy), "the policy lets foreign scripts run")
        expect(any("Content Security Policy" in text for text in page.complaints()), "the check sees breaches of the policy")


def with_token(page, program):
    """The page asks for the token once, and says when it is wrong."""
    with Fixture(program, "--token", TOKEN) as server:
        page.open(server.url)
        page.until("document.querySelector('#ask').open", "the page asks for a token")
        for given in ("wrong", TOKEN):
            page.run("document.querySelector('#token').focus()")
            page.call("Input.insertText", text=given)
            page.key("Enter", 13, "\r")
            if given == "wrong":
                page.until("document.querySelector('#wrong').innerText.includes('refused')", "a wrong token is named")
        page.until("document.querySelectorAll('#jobs tbody tr').length === 4", "the token opens the page")
        page.until("document.querySelectorAll('#events li').length >= 6", "events arrive with the token")
        page.call("Page.reload")
        page.until("document.querySelectorAll('#jobs tbody tr').length === 4", "a reload needs no token")
        expect(not page.run("document.querySelector('#ask').open"), "the page asks again")
        expect(page.run("localStorage.length") == 0 and TOKEN not in page.run("document.cookie + location.href"), "the token is elsewhere too")
        # Only the refusals themselves are on the console.
        others = [text for text in page.complaints() if "status of 401" not in text]
        expect(not others, others)


def lost(page, program):
    """The server goes and comes back: the page says so and goes on."""
    with Fixture(program) as server:
        loaded(page, server.url)
        address = server.address
        quiet(page)
    page.until("document.querySelector('#state').innerText.startsWith('Connection lost')", "the loss is shown")
    expect(page.run("document.querySelector('#state').className") == "bad", "the loss is red")
    expect(len(rows(page, "jobs")) == 4, "what was known stays")
    with Fixture(program, "--listen", address):
        page.until("document.querySelector('#state').innerText === 'Leading, term 3'", "the page finds the server again")
        page.until("[...document.querySelectorAll('#events li')].some(item => item.innerText.includes('another brain'))", "the events begin anew")
    others = [text for text in page.complaints() if "ERR_" not in text]
    expect(not others, others)


def states(page, program):
    """A brain that stands by, and one that has nothing yet."""
    for option, state, body in (("--standby", "Standby: the leader is at 10.0.0.7:4795", "it stands by"), ("--empty", "Not ready yet: opening", "no topology yet")):
        with Fixture(program, option) as server:
            page.open(server.url)
            page.until(f"document.querySelector('#state').innerText === {state!r}", state)
            expect(body in page.text("#nothing"), page.text("#nothing"))
            quiet(page)
            page.open("about:blank")


def large(page, program):
    """128 hosts are all there; 1,024 are folded, and unfold rack by rack."""
    with Fixture(program, "--hosts", "128") as server:
        loaded(page, server.url)
        drawn = page.run("[document.querySelectorAll('.node').length, document.querySelectorAll('.node text').length]")
        expect(drawn == [148, 148], f"all nodes have names: {drawn}")
        quiet(page)
        page.open("about:blank")
    with Fixture(program, "--hosts", "1024") as server:
        loaded(page, server.url)
        folded = page.run("document.querySelectorAll('.node').length")
        expect(folded == 64 + 64 + 32 + 8, f"racks and switches: {folded}")
        page.click_on("document.querySelectorAll('.node')[1].querySelector('rect')")
        page.until(f"document.querySelectorAll('.node').length === {folded + 15}", "a rack unfolds")
        busy = page.run("(() => { const begun = performance.now(); index(); drawing = null; show(); return performance.now() - begun; })()")
        print(f"       1,024 hosts: drawn in {busy:.0f} ms")
        quiet(page)


PARTS = [overview, clicks, keyboard, hostile, with_token, lost, states, large]


def pictures(page, program, folder, seconds):
    """Takes the pictures of the documents, after the figures have moved for a while."""
    with Fixture(program) as server:
        time.sleep(seconds)
        page.size(1280, 1110)
        page.scheme("light")
        loaded(page, server.url)
        page.run("pick('link', linksOfJob.get('1')[1])")
        page.until("(document.querySelector('.spark .used')?.getAttribute('d') ?? '').length > 100", "the history is drawn")
        page.until("document.querySelectorAll('#events li').length >= 6", "events arrive")
        page.screenshot(folder / "cluster-page-light.png")
        page.scheme("dark")
        page.run("pick('job', '4')")
        time.sleep(0.6)
        page.screenshot(folder / "cluster-page-dark.png")
    with Fixture(program, "--hosts", "128") as server:
        page.scheme("light")
        page.size(1280, 560)
        loaded(page, server.url)
        page.run("pick('job', '9')")
        time.sleep(0.6)
        page.screenshot(folder / "cluster-page-128.png")


def build():
    """Builds the server, and returns its path."""
    command = ["cargo", "build", "--quiet", "-p", "cluster", "--example", "web_fixture", "--message-format=json"]
    try:
        built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise lab.Missing(f"the example web_fixture cannot be built: {error}") from error
    return re.findall(r'"executable":"([^"]+web_fixture)"', built)[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="only these parts: " + ", ".join(part.__name__ for part in PARTS))
    parser.add_argument("--server", metavar="FILE", help="the example web_fixture, built already")
    parser.add_argument("--pictures", metavar="FOLDER", type=pathlib.Path, help="take the pictures of the documents instead")
    parser.add_argument("--seconds", metavar="N", type=float, default=200, help="history in the pictures [default: 200]")
    options = parser.parse_args()
    if browser.program() is None:
        print("skipped: there is no Chromium; apt-get install chromium")
        return lab.SKIPPED
    try:
        program = options.server or build()
    except lab.Missing as missing:
        print(f"skipped: {missing}")
        return lab.SKIPPED
    failed = 0
    with browser.Browser() as page:
        if options.pictures:
            pictures(page, program, options.pictures, options.seconds)
            return 0
        for part in PARTS:
            if not re.search(options.only, part.__name__):
                continue
            try:
                # What the page before still says is not about this part.
                page.open("about:blank")
                page.events.clear()
                part(page, program)
                print(f"pass   {part.__name__}: {part.__doc__}")
            except (browser.Failed, OSError):
                failed += 1
                print(f"FAIL   {part.__name__}: {traceback.format_exc(limit=-2)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
