"""A headless Chromium, steered over its DevTools protocol; standard library only.

The protocol is JSON over a WebSocket (RFC 6455), of which this speaks what a client of one peer on loopback needs: text
messages, fragments, ping and close.
"""

import base64
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import urllib.parse

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Failed(Exception):
    """The browser does not do what was asked."""


def program():
    """Path of the browser, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class WebSocket:
    """The client's end of a WebSocket."""

    def __init__(self, url, timeout_s):
        parts = urllib.parse.urlsplit(url)
        self.stream = socket.create_connection((parts.hostname, parts.port), timeout_s)
        key = base64.b64encode(os.urandom(16)).decode()
        self.stream.sendall((
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode())
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.more()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise Failed(f"no WebSocket: {head[:100]}")

    def more(self):
        data = self.stream.recv(1 << 16)
        if not data:
            raise Failed("the browser has closed the connection")
        return data

    def read(self, length):
        while len(self.buffer) < length:
            self.buffer += self.more()
        data, self.buffer = self.buffer[:length], self.buffer[length:]
        return data

    def send(self, data, opcode=1):
        mask = os.urandom(4)
        if len(data) < 126:
            length = bytes([0x80 | len(data)])
        elif len(data) < 1 << 16:
            length = bytes([0x80 | 126]) + struct.pack(">H", len(data))
        else:
            length = bytes([0x80 | 127]) + struct.pack(">Q", len(data))
        masked = bytes(byte ^ mask[at & 3] for at, byte in enumerate(data))
        self.stream.sendall(bytes([0x80 | opcode]) + length + mask + masked)

    def receive(self):
        """The next message."""
        message = b""
        while True:
            first, second = self.read(2)
            length = second & 0x7f
            if length == 126:
                length, = struct.unpack(">H", self.read(2))
            elif length == 127:
                length, = struct.unpack(">Q", self.read(8))
            data, opcode = self.read(length), first & 0xf
            if opcode == 9:
                self.send(data, 10)
            elif opcode == 8:
                raise Failed("the browser has closed the connection")
            elif opcode in (0, 1):
                message += data
                if first & 0x80:
                    return message.decode()


class Browser:
    """A browser with one page. Use it in a `with` statement: it ends with that."""

    def __init__(self, width=1440, height=1150, timeout_s=60):
        self.timeout_s, self.width, self.height = timeout_s, width, height
        self.number, self.events, self.process, self.folder, self.socket = 0, [], None, None, None

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="dquant-browser-", ignore_cleanup_errors=True)
        self.log = open(pathlib.Path(self.folder.name, "log"), "w+b")
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        # Its own sandbox needs namespaces that containers often lack; it only sees pages of this test.
        command = [program(), "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={self.folder.name}/profile",
                   "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
                   "--disable-background-networking", "--hide-scrollbars", f"--window-size={self.width},{self.height}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self.log, start_new_session=True)
        port_file = pathlib.Path(self.folder.name, "profile", "DevToolsActivePort")
        port = self.wait(lambda: port_file.exists() and port_file.read_text().split() or None, "the browser's port")[0]
        url = self.wait(lambda: self.page_url(port), "the browser's first page")
        self.socket = WebSocket(url, self.timeout_s)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(self.width, self.height)

    @staticmethod
    def page_url(port):
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
        connection.request("GET", "/json/list")
        pages = json.loads(connection.getresponse().read())
        connection.close()
        return next((page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"), None)

    def __exit__(self, *_):
        if self.process:
            # The browser is a group of processes.
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def wait(self, condition, what):
        """Waits for a true value, and returns it."""
        end = time.monotonic() + self.timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                self.log.seek(0)
                raise Failed(f"the browser has ended: {self.log.read()[-400:].decode(errors='replace')}")
            value = condition()
            if value:
                return value
            time.sleep(0.05)
        raise Failed(f"not in {self.timeout_s} s: {what}")

    def call(self, method, **params):
        """Calls a method of the protocol. Events that arrive meanwhile are kept."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}).encode())
        while True:
            message = json.loads(self.socket.receive())
            if message.get("id") == self.number:
                if "error" in message:
                    raise Failed(f"{method}: {message['error']}")
                return message["result"]
            if "method" in message:
                self.events.append(message)

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name):
        """Makes the page light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'", f"{url} is loaded")

    def run(self, expression):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise Failed(f"{expression}: {result['exceptionDetails'].get('exception', {}).get('description')}")
        return result["result"].get("value")

    def until(self, expression, what=None):
        """Waits until an expression is true, and returns its value."""
        return self.wait(lambda: self.run(expression), what or expression)

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click_on(self, element):
        """Clicks with the mouse on the middle of what a JavaScript expression names."""
        box = self.run(f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'nearest'}}); const b = e.getBoundingClientRect();"
                       " return [b.x + b.width / 2, b.y + b.height / 2]; })()")
        self.click(*box)

    def key(self, name, code=0, text=""):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, text=text if kind == "keyDown" else "")

    def complaints(self):
        """What the page has complained of: errors on its console, exceptions, breaches of its policy."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(" ".join(str(argument.get("value", argument.get("description"))) for argument in params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['source']}: {params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))
