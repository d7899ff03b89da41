"""stub"""
def folded(*a):
    raise NotImplementedError
