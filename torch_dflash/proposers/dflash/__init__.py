"""DFlash v1: its configuration, its network and how it proposes."""
