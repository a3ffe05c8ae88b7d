"""The text that the tokenizer of `stts-tiny` is trained on: what one says about shapes that move in a short video."""

from itertools import product

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "black", "grey", "pink")
SHAPES = ("circle", "square", "triangle", "ball", "box", "star", "ring", "bar", "cross", "dot")
MOTIONS = (
    "moves to the left",
    "moves to the right",
    "moves up",
    "moves down",
    "turns around",
    "bounces off the wall",
    "stands still",
    "grows larger",
    "becomes smaller",
    "disappears behind the wall",
    "comes back",
    "falls to the ground",
)
PLACES = (
    "at the top",
    "at the bottom",
    "in the middle",
    "on the left side",
    "on the right side",
    "in the upper left corner",
    "in the lower right corner",
    "in front of the house",
    "behind the trees",
)
QUESTIONS = (
    "What is moving in this video?",
    "What happens in this video?",
    "Which colour is the {shape}?",
    "Where is the {colour} {shape}?",
    "In which direction does the {shape} move?",
    "How many shapes are there?",
    "How many times does the {colour} {shape} bounce?",
    "When does the {colour} {shape} appear?",
    "Does the {colour} {shape} move or stand still?",
    "Which shape is faster, the {colour} one or the other?",
    "Describe this video.",
    "Describe this image.",
)
PROSE = (
    "A video is a sequence of frames, and most of what one frame shows was already there in the frame before.",
    "The background stays the same while a few things move over it, so many of its patches carry nothing new.",
    "A small network scores every block of patches, and the blocks with the lowest scores are dropped for good.",
    "The first frame is always kept in full, because nothing came before it.",
    "What is left goes through the other layers of the vision transformer, the connector and the language model.",
    "Yes, it does. No, it does not. It is not possible to tell from the video.",
    "First the camera shows a street with cars and people; then it turns slowly towards a quiet garden.",
    "A person opens the door, walks across the room, picks up a cup from the table and sits down on a chair.",
    "Two children are playing with a dog near the water while a man is reading a newspaper on a bench.",
    "A woman cuts vegetables on a wooden board, puts them into a pan and adds a little oil and salt.",
    "Answer with the letter of the correct option. A. left B. right C. up D. down E. none of these",
    "one two three four five six seven eight nine ten eleven twelve zero once twice several many few",
    "Between 3.5 and 7.0 seconds the object moves quickly; after 12.5 seconds everything is still again.",
    "The picture is bright at the beginning and dark at the end. The sky is clear and the sun is shining.",
    "Because the shadow follows the ball, it is easy to see how high above the floor the ball is.",
    "It starts slowly, becomes faster, stops for a moment and then goes on in the opposite direction.",
)

WORDS = """
user assistant system question answer option caption subtitle summary time second minute hour morning evening night
day hand head face arm leg foot finger hair shirt jacket hat shoe glasses bag book phone computer screen keyboard
paper pen kitchen window floor roof road bridge river mountain beach forest field city station train bus truck bicycle
motorcycle plane boat horse cat bird fish cow sheep elephant flower leaf grass rock snow rain wind cloud fire smoke
light shadow football basketball tennis guitar piano drum music dance song game team player goal score race winner
bread cheese apple banana lemon tomato potato onion rice soup meat egg milk coffee tea sugar bottle glass plate knife
run jump climb swim ride drive throw catch kick push pull lift carry hold open close wash clean paint draw write speak
big small long short tall wide narrow thick thin heavy hard soft warm cold wet dry old young new same different next
last above below between inside outside near far around across along through before after during while until again
always never because however therefore although without within about against towards another together nothing
everything something
"""


def training_sentences() -> list[str]:
    """Returns about 1,700 sentences, always the same and in the same order."""
    sentences = [*PROSE, WORDS, WORDS.title()]
    for number, (colour, shape, motion) in enumerate(product(COLOURS, SHAPES, MOTIONS)):
        place = PLACES[number % len(PLACES)]
        sentences.append(f"The {colour} {shape} {motion} {place} after {number % 64 / 2} seconds.")
    for number, (colour, shape) in enumerate(product(COLOURS, SHAPES)):
        for offset in range(5):
            question = QUESTIONS[(number + offset) % len(QUESTIONS)].format(colour=colour, shape=shape)
            sentences.append(f"{question} A {colour} {shape}. There are {number % 10} shapes, and one is {colour}.")
    return sentences
