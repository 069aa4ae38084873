"""Words for synthetic tasks."""

from random import Random

_ADJECTIVES = """
able amber ancient bitter blue bold brave brief bright broad brown busy calm careful cheap clean clear clever cold
common cool curious damp dark deep dense distant dry eager early easy empty equal fair famous fast final fine firm
flat fresh gentle glad golden good grand gray great green happy hard heavy honest hollow humble idle kind large late
lazy light little lively local lonely long loud lucky mild modest narrow neat new noble old open orange pale patient
plain polite proud pure purple quick quiet rapid rare red ripe rough round royal rusty sad sharp short shy silent
silver simple slow small smooth soft solid sour square steady still strange strong sudden sweet swift tall tender
thick thin tiny tired true upper vast warm weak wet white whole wide wild wise wooden yellow young
"""
_NOUNS = """
acorn actor anchor ankle answer apple apron arrow artist autumn bakery ball banana bank barn basin basket beach bean
bear bell bench berry bird blanket boat bottle branch bread breeze brick bridge brook broom bucket button cabin
camel camera candle canvas captain carpet castle cat cave chair chalk cheese cherry chimney circle city clock cloud
coast coin comet copper corn cotton cousin crow crown cup curtain dancer desert desk diary doctor dog donkey door
dragon drum duck dust eagle ear earth elbow engine evening farmer feather fence field finger fire fish flag flame
flower flute forest fountain fox friend frog fruit garden gate giant glass glove goat grain grape grass hammer
harbor hat hen hill hinge honey horse house ink insect iron island jacket jar jewel journey judge jungle kettle key
kitchen kite knife ladder lake lamp lantern leaf lemon letter library lion lizard machine magnet map market meadow
melon metal milk mill mirror monkey moon morning mountain mouse music nail needle nest night novel nurse oak ocean
oven owl paddle page paint palace paper parrot peach pearl pencil pepper piano picture pillow pilot pine planet
plate pocket poem pond potato prince pump puzzle queen rabbit rain ribbon rice ring river road robin rock roof rope
rose sail salt sand school sea seed shadow sheep shell ship shoe shoulder silk singer sister sky snail snow soap
song spider spoon spring squirrel stable star station stone storm story stove street sugar summer sun swan table
tailor teacher temple tent thread thunder tiger tomato tooth tower train tree trumpet tunnel turtle uncle valley
vase village violin voice wagon wall water wave wheel whale wheat whistle window wing winter wolf wood wool worker
yard
"""
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
SINGLE = sorted({*ADJECTIVES, *NOUNS})
PAIRS = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]


def word(random: Random) -> str:
    """An adjective and a noun, such as calm-river."""
    return random.choice(PAIRS)


def words(count: int, random: Random) -> list[str]:
    """Different words: single ones, or pairs where there are too few of those."""
    known = SINGLE if count <= len(SINGLE) else PAIRS
    if count > len(known):
        raise ValueError(f"{count:,} different words: there are only {len(known):,}, give shorter prompts")
    return random.sample(known, count)
