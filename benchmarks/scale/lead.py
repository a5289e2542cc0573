"""A coordinator without Ray, on uvloop as in a replica of Serve; arguments as `cluster.lead`."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from cluster.lead import main

if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    sys.exit(main())
