"""Text becomes updates."""
