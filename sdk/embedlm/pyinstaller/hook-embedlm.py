"""``embedlm`` imports ``sdk`` where no analysis of its source sees it."""

hiddenimports = ["sdk"]
