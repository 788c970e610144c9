"""The coordinator: one long-running daemon that decides, journals, and then acts."""
