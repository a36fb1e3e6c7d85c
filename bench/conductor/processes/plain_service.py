"""A minimal service on FastAPI and uvicorn: it reads a request's body and answers with a line.

`python -m tiffin.bench.conductor.processes.plain_service PORT` serves every path on loopback, with
uvicorn configured as the conductor does.
"""

from __future__ import annotations

import sys

import uvicorn
import uvloop
from fastapi import FastAPI, Request

METHODS = ["GET", "POST"]


def application() -> FastAPI:
    """One route for all paths."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=METHODS)
    async def hello(path: str, request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    return app


def main(port: int) -> None:
    """Serve until SIGTERM."""
    configuration = uvicorn.Config(
        application(),
        host="127.0.0.1",
        port=port,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        proxy_headers=False,
        timeout_keep_alive=75,
    )
    uvloop.run(uvicorn.Server(configuration).serve())


if __name__ == "__main__":
    main(int(sys.argv[1]))
