"""The words of the log book: names, goods, and templates of sentences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """Templates of the sentence that states a fact, and of the question for it. The words between name and value are
    the same in the answer; a question ends with the name."""

    statement: str
    question: str


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    """The phrases of a text that are separated by bars or ends of lines."""
    return tuple(text.replace("\n", "|").split("|"))


_FIRST_PARTS = _words(
    """Sea Storm Silver North South East West Moon Sun Summer Winter Snow Frost Gold Iron Stone White Grey Green Blue
Bright Fair Swift Wild Night Morning Evening Salt Sand Rain Spring Harvest"""
)
_SECOND_PARTS = _words(
    """gull hawk wing rose light fish bird wave crest field bell lark star swan heart brook thorn leaf crown song ridge
horn fire ford mere tide helm spear maid bough dove mark"""
)
SHIPS = tuple(first + second for first in _FIRST_PARTS for second in _SECOND_PARTS)
"""Names of ships; a log uses each for one ship at most."""

KINDS = _words("brig schooner sloop ketch barque cutter")
FIRST_NAMES = _words(
    """Helen Peter Ruth Samuel Martha Simon Alice Robert Clara Thomas Edith Walter Nora Arthur Daniel Grace Philip Laura
Ralph Hugh Margaret Oliver Judith Edmund Harriet Gilbert Susan Lawrence Phoebe Martin Esther Roger"""
)
SURNAMES = _words(
    """Reed Marsh Holt Wells Cooper Dyer Gale Hardy Irving Kemp Lowe Mercer Nash Orme Pike Quinn Rowe Thorne Usher Vance
Yates Barlow Carter Doyle Ellis Fenn Gibbs Hale Jarvis Knox Lamb Noble Ogden Paine Rudd Shaw Tate Webb Bligh Crane
Drake Finch Hood Ashby Bolton Croft Denham Farrow"""
)
PORTS = _words(
    """Riga Lisbon Bergen Cadiz Hull Danzig Genoa Malta Bristol Cork Oslo Turku Naples Porto Leith Ghent Antwerp Havre
Bordeaux Stettin Lubeck Visby Palermo Smyrna Tangier Dover Whitby Aberdeen Galway Nantes Hamburg Bremen Rotterdam
Trieste Venice Odessa Tallinn Stockholm Halifax Boston"""
)
GOODS = _words(
    """oil wheat tallow timber wool salt coal hemp tar sugar coffee tea rice leather copper glass wine tobacco cotton
paper cheese herring rope slate marble lead honey candles flax barley oranges raisins cork nails pepper indigo
linen hides soap vinegar"""
)
UNITS = _words("casks sacks bales barrels chests crates tons boxes bundles loads")
NEEDS = _phrases(
    """a new mast|a new anchor|two new sails|fresh water|a second boat|a coat of tar|new rigging|a longer cable
a sound pump|a new rudder|sixty planks|a better lantern|oakum and pitch|a new keel|three good oars|a cook
a new compass|dry powder|six more hands|a fresh chart"""
)

FACTS: dict[str, tuple[Form, ...]] = {
    "origin": (
        Form("{ship} came from {port}", "From which port came the {ship}?"),
        Form("{ship} hailed from {port}", "From where hailed the {ship}?"),
        Form("{ship} arrived from {port}", "From where arrived the {ship}?"),
    ),
    "berth": (
        Form("{ship} lay at berth {berth}", "At which berth lay the {ship}?"),
        Form("{ship} took berth {berth}", "Which berth was taken by the {ship}?"),
        Form("{ship} was given berth {berth}", "Which berth was given to the {ship}?"),
    ),
    "captain": (
        Form("{ship} was commanded by {first} {last}", "Who commanded the {ship}?"),
        Form("{ship} answered to {first} {last}", "To whom answered the {ship}?"),
    ),
    "cargo": (
        Form("{ship} brought {number} {unit} of {good}", "What was brought by the {ship}?"),
        Form("{ship} landed {number} {unit} of {good}", "What was landed by the {ship}?"),
        Form("{ship} carried {good} in {number} {unit}", "What was carried by the {ship}?"),
    ),
    "need": (
        Form("{ship} needed {need}", "What was needed by the {ship}?"),
        Form("{ship} asked for {need}", "What was asked for by the {ship}?"),
    ),
    "mender": (
        Form("{ship} was mended by {first} {last}", "Who mended the {ship}?"),
        Form("{ship} was looked over by {first} {last}", "Who looked over the {ship}?"),
    ),
    "dues": (
        Form("{ship} paid {number} crowns", "How much was paid by the {ship}?"),
        Form("{ship} owed {number} crowns", "How much was owed by the {ship}?"),
    ),
    "goal": (
        Form("{ship} sailed for {port}", "For which port sailed the {ship}?"),
        Form("{ship} left for {port}", "For where left the {ship}?"),
        Form("{ship} was bound for {port}", "Bound for which port was the {ship}?"),
    ),
    "load": (
        Form("{ship} loaded {number} {unit} of {good}", "What was loaded by the {ship}?"),
        Form("{ship} stowed {number} {unit} of {good}", "What was stowed by the {ship}?"),
    ),
    "guests": (
        Form("{ship} embarked {few} passengers", "How many embarked on the {ship}?"),
        Form("{ship} was joined by {first} {last}", "Joined by whom was the {ship}?"),
    ),
}

LEAD_INS = (
    "The ",
    "The ",
    "The ",
    "The ",
    "The ",
    "As we heard, the ",
    "So far as the books show, the ",
    "To our knowledge the ",
    "As the pilot says, the ",
    "It was noted that the ",
    "By all reports the ",
)
MORE: dict[str, tuple[str, ...]] = {
    "origin": (
        "She was {n} days at sea.",
        "It had been a rough passage.",
        "All hands were well.",
        "The wind was {wind} then.",
        "No other sail was spoken on the way.",
        "{one} saw her first.",
    ),
    "berth": (
        "This is below the {quay} quay.",
        "{one} had wished it so.",
        "The water is deepest there.",
        "A boat of {stranger} lies beside it.",
        "Another was promised.",
        "{one} caught the ropes.",
    ),
    "captain": (
        "The name is known here.",
        "{one} was sent for at once.",
        "The papers were in order.",
        "There were {n} hands in all.",
        "We heard nothing but good.",
        "{one} saw the papers.",
    ),
    "cargo": (
        "All of it was dry.",
        "{one} signed for it.",
        "It is for a house in {port}.",
        "It was weighed by {one}.",
        "Some of it was spoiled.",
        "It went to the {quay} store.",
    ),
    "need": (
        "The yard was told.",
        "{one} had said so.",
        "{one} has promised it.",
        "It is wanted before the next tide.",
        "The last passage was to blame.",
        "It will be waited for.",
    ),
    "mender": (
        "It was done in {n} days.",
        "The price was fair.",
        "{one} gave help.",
        "The work was good.",
        "It was done on the {quay} slip.",
        "{one} watched.",
    ),
    "dues": (
        "{one} wrote the receipt.",
        "It was good coin.",
        "It was for the use of the crane.",
        "There was no complaint.",
        "Of these {n} were for light.",
        "{one} counted them.",
    ),
    "goal": (
        "It was on the ebb.",
        "The wind was {wind}.",
        "We wished her well.",
        "Two others went in company.",
        "The fog had gone by then.",
        "{one} was sorry to miss it.",
    ),
    "load": (
        "It came from the {quay} store.",
        "{one} saw it stowed.",
        "It was half a day of work.",
        "It was bought of {stranger}.",
        "It was counted twice.",
        "It was the last of the season.",
    ),
    "guests": (
        "The mail went with them.",
        "The list shows it.",
        "{one} saw to the boat.",
        "There was much luggage.",
        "It was at the last moment.",
        "{one} entered it here.",
    ),
}

WINDS = _words("northerly southerly easterly westerly light strong steady fresh")
QUAYS = _words("old new long lower upper inner outer western eastern middle")
TRADES = _words("pilot cooper carpenter smith baker fisherman clerk tailor schoolmaster rope-maker")
WORKS = _phrases(
    """work on the sea wall|mending nets|painting the lamp house|clearing the channel|a new door|two days at the crane
repairs to the steps|copying letters|carting stones|watching by night|a set of weights|cleaning the boats"""
)
WEATHER = (
    "Fog until noon, then a {wind} wind.",
    "A {wind} wind all day, and a heavy sea outside the bar.",
    "Clear and cold; the harbour was still as glass.",
    "Rain since before daylight, and the wind {wind}.",
    "A fine morning, warm for the season.",
    "Thunder in the night, but no damage on the {quay} quay.",
    "Some snow in the early hours, gone by the afternoon.",
    "Calm. The flags hung straight down from the masts.",
    "The sky grey from end to end, and a {wind} wind.",
    "High water at {n} minutes past the hour; weather settled.",
    "Hail at noon, and the boats were called in.",
    "A red sunrise, which {one} did not like.",
    "A {wind} wind that fell towards evening.",
    "Mist on the water, and the bell was rung until ten.",
    "Dry and bright, with a {wind} wind.",
    "The glass fell all day, and {one} had the ropes doubled.",
    "Showers, and between them a good deal of sun.",
    "The first mild day for a week.",
)
REMARKS = (
    "The crane on the {quay} quay was out of order until dark.",
    "To {one}, for {work}: {sum} crowns.",
    "A boat was found adrift by {one} and tied up at the steps.",
    "The lamp on the {quay} pier wanted oil; {one} was sent to fill it.",
    "{one} complained of the noise in the night, and it was noted.",
    "Two sailors quarrelled on the {quay} quay, and {one} parted them.",
    "The harbour master walked the {quay} pier with {one} and found all in order.",
    "{one} may dry nets on the {quay} quay until further notice.",
    "The tide gauge stood at {n} feet when {one} read it.",
    "A letter for {one} is kept at the office.",
    "{stranger}, a {trade}, wanted work and was sent to {one}.",
    "{one} has been ill and is better.",
    "Bought of {stranger}: {n} loads of {good}, at {sum} crowns.",
    "{one} and {other} were seen to shake hands at last.",
    "A child fell from the {quay} steps and was pulled out by {one}, who would hear no thanks.",
    "{one} claims to be a native of {port}; {other} does not believe it.",
    "The price of {good} has risen again.",
    "It was settled that {one} shall keep the keys while {other} is away.",
    "{one} is back from {port} after {n} weeks.",
    "The clerk found an error of {sum} crowns, and then another that made it good.",
    "{stranger}, on the way to {port}, had supper with {one}.",
    "Received of {one}, for the use of the {quay} store, {sum} crowns.",
    "A whale was seen beyond the bar by {one}.",
    "{one} lost a hat to the wind, and {other} a wager.",
    "The school saw the {quay} quay, and was loud.",
    "{one} would have it written here that the fault was with {other}.",
    "Nothing more to remark.",
    "The widow of {stranger} had {sum} crowns from the box.",
    "{one} is to marry; {other} told it to everyone.",
    "An officer from {port} read the books and praised the hand of {one}.",
    "Rats were found in the {quay} store, among the {good}; a cat has been engaged.",
    "{one} wants a new stove, and says so a third time.",
    "The dog of {other} bit the {trade}, who had kicked it.",
    "{one} read the newspaper from {port} aloud, and it was {n} days old.",
    "For candles and ink: {n} crowns.",
    "The bell was heard at night; {one} says by the wind, {other} by nobody.",
    "No mail today.",
    "A cask rolled into the water near {one}, who was asleep.",
    "{one} bought the old boat of {other} for {sum} crowns.",
    "A parcel for {one} is here, from {stranger}, whom nobody knows.",
    "The {trade} will be here on Monday.",
    "The well at the {quay} quay gave brackish water, and {one} had it closed for {n} days.",
    "{one} taught {other} to splice, with little success.",
    "{n} gulls were counted on the roof of the office.",
    "The clock stopped at {n} minutes to six, and {one} set it going.",
    "{one} caught fish for the whole office.",
    "A fiddle was heard from the {quay} quay until late; it was {other}.",
    "{one} still has {sum} crowns to pay to the office.",
)
