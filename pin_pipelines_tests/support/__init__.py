"""What tests of several rooms work with: things under test, real servers and processes, and faults on demand."""

from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
