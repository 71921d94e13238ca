"""What the synthesised voices say: digits, digits spelled for other languages' voices, and other speech."""

from __future__ import annotations

import random

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# English digits as a speaker of the language would write them down by ear: read by that language's
# voice they come out with its accent. Keys are espeak-ng's language names.
RESPELLED: dict[str, str] = {
    "de": "siro wan tu sri for faif siks sewen äit nain",
    "fr-fr": "ziro ouane tou sri fore faïve sikse sévène éïte naïne",
    "es": "siro uan tu tri for faif siks seven eit nain",
    "es-419": "siro uan tu tri for faiv siks seven eit nain",
    "it": "ziro uan tu tri for faiv sics seven eit nain",
    "pt-br": "ziro uan tu tri for faivi sics séven eit nain",
    "pl": "ziroł łan tu fri for fajw siks sewen ejt najn",
    "nl": "ziro wan toe srie for faajf siks seven eet najn",
    "sv": "siro wan to sri får fajv siks seven ejt najn",
    "fi": "siirou uan tuu trii foor faiv siks seven eit nain",
    "hu": "ziro van tú szrí for fájv sziksz szeven ejt nájn",
    "tr": "ziro van tu tri for fayv siks sevın eyt nayn",
    "ro": "zirou uan tu tri for faiv sics seven eit nain",
    "cs": "zírou uan tú srí fór fajv siks sevn ejt najn",
    "ca": "siro uan tu tri for faif siks seven eit nain",
    "hi": "ज़ीरो वन टू थ्री फोर फाइव सिक्स सेवन एट नाइन",
    "mr": "झीरो वन टू थ्री फोर फाइव सिक्स सेवन एट नाइन",
    "ru": "зироу уан ту сри фор файв сикс сэвен эйт найн",
    "te": "జీరో వన్ టూ త్రీ ఫోర్ ఫైవ్ సిక్స్ సెవెన్ ఎయిట్ నైన్",
    "ta": "ஜீரோ ஒன் டூ த்ரீ ஃபோர் ஃபைவ் சிக்ஸ் செவன் எயிட் நைன்",
    "id": "siro wan tu tri for faif siks seven eit nain",
    "el": "ζίρο γουάν του θρι φορ φάιβ σιξ σέβεν έιτ νάιν",
    "ko": "제로 원 투 쓰리 포 파이브 식스 세븐 에이트 나인",
}


def spoken_words(language: str) -> tuple[str, ...]:
    """The ten digits, zero first, as text for a voice of this language ("en..." for English)."""
    return WORDS if language.startswith("en") else tuple(RESPELLED[language].split())


def digit_text(digits: str, language: str, rng: random.Random) -> str:
    """Text that makes a voice say these digits, with a random way of setting them apart."""
    words = spoken_words(language)
    between = rng.choice([" ", " ", " ", ", "])
    return between.join(words[int(d)] for d in digits) + rng.choice([".", ".", ",", "?", "!"])


_SUBJECTS = (
    "I", "we", "they", "you", "my fellow citizens", "the people of your country", "the captain",
    "an old friend", "my mother", "the weather", "a quiet voice", "the government", "her sister",
    "the doctor", "every child", "this machine", "the river", "our neighbours", "the last train", "nobody",
)  # fmt: skip
_VERBS = (
    "asked", "wanted to see", "cannot find", "will ask", "might bring", "never heard about",
    "did not answer", "looked for", "can do more about", "went to", "would like", "is waiting for",
    "must remember", "talked to", "wrote a letter to", "ran away from", "may not know", "could hear",
)  # fmt: skip
_OBJECTS = (
    "what you can do for your country", "the red house on the hill", "a cup of coffee", "the answer",
    "your brother and me", "the old town", "some bread and butter", "what happened to him",
    "the horizon", "more than enough", "a wizard behind the curtain", "the freedom of man",
    "those who came before", "an apple", "the music", "what is so far away", "the telephone",
    "a long and difficult story", "the people", "whatever was left", "a phone call to the office",
)  # fmt: skip
_TAILS = (
    "", "", "", "and then left", "in the morning", "for a while", "because of the rain", "with you",
    "to the end", "as always", "but not for me", "at the station", "so they say", "and ask for help",
)  # fmt: skip
_SENTENCES = (
    "Thank you for calling, please hold the line.",
    "And what will you do about it?",
    "Ask what your friends can do for you.",
    "He began a long argument with the man who had vanished.",
    "The sun was seen far above the sea.",
    "Please leave your name and your message after the tone.",
    "Good morning, how are you today?",
    "It is said that the forest was full of foxes and wolves.",
    "The quick brown fox jumps over the lazy dog.",
    "She sells sea shells by the sea shore.",
    "You should have told me that before.",
    "Well, I do not think so.",
    "This is a test of the emergency system.",
    "Where have all the flowers been?",
    "Could you repeat that, please?",
    "My fellow travellers, do not be afraid.",
    "Let us go to the park before it gets dark.",
    "Freedom is never free, my friends.",
    "I want to thank you all for coming to our party.",
    "And so it goes, year after year.",
    "Not what they can do for us, but what we can do.",
    "When in the course of human events it becomes necessary.",
    "He was an American citizen.",
    "Country roads take me home.",
    "To be or not to be, that is the question.",
    "All the world is a stage, and all the men and women merely players.",
)
_WORDS = (
    "yes", "no", "hello", "stop", "left", "right", "up", "down", "go", "off", "cat", "dog", "bird",
    "house", "tree", "happy", "wow", "bed", "sheila", "marvin", "okay", "please", "thanks", "country",
    "Americans", "fellow", "people", "morning", "garden", "window", "music", "table", "paper",
    "hundred", "thousand", "plus", "minus", "number", "name", "letter", "water", "orange", "coffee",
    "sorry", "maybe", "never", "always", "again", "help", "open", "close", "alpha", "bravo", "charlie",
)  # fmt: skip


def other_text(rng: random.Random) -> str:
    """English speech without digits: a fixed sentence, a made-up one, or one to three stray words."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(_SENTENCES)
    if kind < 0.75:
        parts = [rng.choice(_SUBJECTS), rng.choice(_VERBS), rng.choice(_OBJECTS), rng.choice(_TAILS)]
        return " ".join(p for p in parts if p) + rng.choice([".", ".", "?", "!"])
    return ", ".join(rng.sample(_WORDS, rng.randint(1, 3))) + "."


_SIMILAR_WORDS = (
    "hero", "zebra", "sierra", "arrow", "narrow", "pseudo", "run", "sun", "gun", "fun", "want", "wand",
    "when", "wine", "do", "new", "few", "who", "true", "tooth", "tool", "tree", "free", "tea", "thread",
    "throw", "through", "more", "door", "war", "form", "fault", "fall", "fair", "fight", "find", "fire",
    "hive", "live", "dive", "file", "sit", "sex", "fix", "sick", "sink", "mix", "stick", "heaven",
    "eleven", "driven", "several", "lemon", "seldom", "shaven", "late", "date", "wait", "hate", "great",
    "age", "eighth", "able", "fine", "line", "mine", "night", "knife", "nice", "time", "nigh", "ninth",
)  # fmt: skip
"""They sound much like digits and are none."""

_ONSETS = (
    *("b", "br", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p", "pl", "pr"),
    *("r", "s", "sh", "sk", "sl", "st", "t", "th", "tr", "v", "w", "z", "ch", ""),
)
_NUCLEI = ("a", "e", "i", "o", "u", "ai", "ee", "oo", "ou", "ar", "er", "or", "ay", "oy", "aw")
_CODAS = (
    "",
    "",
    "b",
    "d",
    "f",
    "g",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "x",
    "nd",
    "st",
    "nk",
    "sh",
)


def _made_up_word(rng: random.Random) -> str:
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(syllables))


def strange_text(rng: random.Random) -> str:
    """Words that sound like digits, made-up words, or both: more sounds than any list of sentences has."""
    kind = rng.random()
    if kind < 0.35:
        return ", ".join(rng.sample(_SIMILAR_WORDS, rng.randint(1, 4))) + "."
    words = [_made_up_word(rng) for _ in range(rng.randint(1, 9))]
    if kind < 0.6:
        words[rng.randrange(len(words))] = rng.choice(_SIMILAR_WORDS)
    return " ".join(words) + "."
