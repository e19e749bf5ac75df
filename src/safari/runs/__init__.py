"""A run's folder: config, records, checkpoints, summary; safe against crashes and second writers."""

from safari.runs.checkpoint import Saved, model_size, read_checkpoint, spacing
from safari.runs.folder import RunFolder, Trial, read_lines, seeds_of
from safari.runs.metrics import CLASSIFICATION, RunMetrics
from safari.runs.record import ClientStatus, RoundRecord
from safari.runs.summary import best_score, done_records, spread, summarise, summarise_trial

__all__ = [
    "CLASSIFICATION",
    "ClientStatus",
    "RoundRecord",
    "RunFolder",
    "RunMetrics",
    "Saved",
    "Trial",
    "best_score",
    "done_records",
    "model_size",
    "read_checkpoint",
    "read_lines",
    "seeds_of",
    "spacing",
    "spread",
    "summarise",
    "summarise_trial",
]
