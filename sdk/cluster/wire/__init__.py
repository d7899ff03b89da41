"""Messages between processes: streams with deadlines, frames, who may send them, and what they may
contain (docs/architecture.md, "Messages between processes").
"""
