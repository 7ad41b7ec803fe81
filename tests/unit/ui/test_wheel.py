"""The page is in the wheel, with the chart library where set-up fetched it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
from fastapi import FastAPI

from polykv_proxy.ui.page import STATIC, add_page

ROOT = Path(__file__).resolve().parents[3]


async def test_the_page_is_served_out_of_a_built_wheel(tmp_path: Path) -> None:
    """A wheel holds every file of the page, and what is unpacked from it is served."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    installed = tmp_path / "site/polykv_proxy/ui/static"
    held = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert held == {path.relative_to(STATIC) for path in STATIC.rglob("*") if path.is_file()}
    app = FastAPI(openapi_url=None)
    add_page(app, installed)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
        for path in ("ui", *(f"ui/{name}" for name in held)):
            assert (await client.get(f"/polykv/{path}")).status_code == 200, path
