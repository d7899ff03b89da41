"""Prompts of a given number of tokens, without a tokenizer.

A load generator for any server does not have the server's tokenizer. So its prompts are made of
words that are one token each in every common vocabulary: N words are N tokens, except for a token
or two that a tokenizer adds.
"""

from __future__ import annotations

import random

#: Frequent English words. A test looks them up in two unrelated vocabularies.
_LIST = """
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will no
more if out so up said what its about than into them can only other time new some could these
two may first then do any like my now over such our man me even most made after also well did
many must before back see through way where get much go good your work day year down us because
being state world still life people use great same old right place long little own again men
home house might never off just know end come since under another last take found while war
part set high head left hand small number few why went both water eyes fact side between without
once asked want find land here give group country large thought always night began point given
general later until used field form next city money second
"""
WORDS = tuple(_LIST.split())
#: Characters of English prose per token, roughly: vocabularies of 32,000 to 256,000 tokens have
#: 3.9 to 4.6 on Python's help topics.
_PROSE = 4.2
SOURCES = ("words", "prose")


def make_text(source: str, tokens: int, draw: random.Random) -> str:
    """A text of about ``tokens`` tokens: random ``"words"``, or a piece of ``"prose"``.

    Prose are sections of Python's help topics, which repeat phrases as documents do. Its length is
    an estimate; reports have the number that the server counted.
    """
    if source == "words":
        return " ".join(draw.choices(WORDS, k=tokens))
    from pydoc_data.topics import topics

    needed = round(tokens * _PROSE)
    names = sorted(topics)
    first = draw.randrange(len(names))
    text = topics[names[first]]
    begin = draw.randrange(len(text))
    text = text[begin:]
    while len(text) < needed:
        first = (first + 1) % len(names)
        text += topics[names[first]]
    return text[:needed]
