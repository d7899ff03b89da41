def tokenizer_from_folder(*a): return None
