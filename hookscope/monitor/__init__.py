"""Stand beside a training loop: figures of every layer at sampled steps, the loop itself untouched."""

from __future__ import annotations

from hookscope.monitor.block import Monitor

__all__ = ["Monitor"]
