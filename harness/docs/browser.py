"""A headless Chromium, driven over a pipe by its DevTools protocol: no port, and no library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--force-color-profile=srgb",
)
# Chromium reads commands from descriptor 3 and writes answers to 4.
_LAUNCHER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_FREE_DESCRIPTOR = 20
TIMEOUT_S = 120.0

Scheme = Literal["light", "dark"]
Message = dict[str, Any]


def find_chromium() -> str | None:
    """Return the path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a Chromium: it loads files, evaluates scripts, and presses keys."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.events: list[Message] = []
        """Messages of the page since it was loaded, except answers."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Message:
        """Send a command and return its result; RuntimeError with Chromium's words if it failed."""
        self._last_id += 1
        command: Message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next_message()
            if message.get("id") != self._last_id:
                self.events.append(message)
            elif "error" in message:
                raise RuntimeError(f"{method}: {message['error']}")
            else:
                return message["result"]

    def open(self, page: Path, width: int = 1280, height: int = 800, scheme: Scheme = "light") -> None:
        """Load a file on a screen of this size, and wait until it is complete."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next_message())

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key by its name and its Windows key code, as DevTools wants it."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, top: float, height: float) -> bytes:
        """Return a part of the page as PNG: its whole width, from ``top`` on, at most to its end."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shown = min(height, size["height"] - top)
        clip = {"x": 0, "y": top, "width": size["width"], "height": shown, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    @property
    def errors(self) -> list[str]:
        """Messages of the console, exceptions and violations of the page's policy since it was loaded."""
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            if event.get("method") in ("Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(json.dumps(event["params"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for, those of data inside it left out."""
        sent = [
            event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"
        ]
        addresses = [params["request"]["url"] for params in sent]
        return [address for address in addresses if not address.startswith("data:")]

    def _next_message(self) -> Message:
        deadline = monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium did not answer within {TIMEOUT_S:.0f} s")
            part = os.read(self._answers, 2**20)
            if not part:
                raise RuntimeError("Chromium ended; run it by hand to see why")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


@contextmanager
def open_browser(program: str) -> Iterator[Browser]:
    """Start a Chromium with an empty profile, and end it."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, _FREE_DESCRIPTOR) for end in (theirs_in, theirs_out)]
    os.close(theirs_in)
    os.close(theirs_out)
    # The profile may still be written to while the browser's processes end.
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        launch = [sys.executable, "-S", "-c", _LAUNCHER, *map(str, theirs), program]
        process = subprocess.Popen(
            [*launch, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in theirs:
            os.close(end)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the browser, which ends when its pipe closes; kill it if it does not."""
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
