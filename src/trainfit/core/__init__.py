"""Shared by every part: errors, files, typed JSON, records, the table of settings."""
