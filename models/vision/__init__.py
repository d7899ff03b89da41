"""Images as models read them: the encoders of images ("towers") and what connects them to text."""
