"""The paper's claims, run again: experiments with what the paper says, verdicts, a page."""
