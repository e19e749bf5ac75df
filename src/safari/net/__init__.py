"""Models over best-effort datagrams: what arrived by the deadline counts. No torch in here (extra: net)."""
