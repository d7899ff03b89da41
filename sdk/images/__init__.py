"""Images: from what callers give to what a model's tower reads. Needs Pillow (extra ``vision``)."""
