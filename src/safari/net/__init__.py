"""Models over best-effort datagrams: what arrived by the deadline counts. Never imports torch (extra: net)."""
