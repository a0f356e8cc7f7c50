"""Make the built-in prompt set: hand-written prompts, filled templates and sampled user turns.

Templates are here and in more_templates.py; sample_turns.py samples the user turns from the target.
Run `python data/make_prompts.py`; the same script, hand-written and sampled files always give the same bytes.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from more_templates import MORE_TEMPLATES

FOLDER = Path(__file__).parent / "prompts"
COUNTS = {"math": 1980, "code": 1980, "chat": 1620, "instruction": 1710, "extraction": 1710}
MORE = 600
"""Number of prompts per category from more_templates.py."""
TRIES = 30


def main():
    rng = Random(0)
    handwritten = [json.loads(line) for line in (FOLDER / "handwritten.jsonl").read_text().splitlines()]
    seen: set[str] = set()
    rows = {}
    for category, count in COUNTS.items():
        own = [row["content"] for row in handwritten if row["category"] == category]
        rows[category] = [
            row_of(category, i, text) for i, text in enumerate(collect(own, TEMPLATES[category], count, seen, rng))
        ]
    for category in COUNTS:
        more = collect([], MORE_TEMPLATES[category], MORE, seen, rng)
        rows[category] += [row_of(f"{category}-more", i, text, category) for i, text in enumerate(more)]
        rows[category] += sampled_turns(category, seen)
    prompts = interleave(rows, rng)
    check(prompts)
    with open(FOLDER / "builtin.jsonl", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts)
    for (category, split), count in sorted(Counter((row["category"], row["split"]) for row in prompts).items()):
        print(f"{category:12} {split:12} {count}")


def collect(handwritten: list[str], templates: list[str], count: int, seen: set[str], rng: Random) -> list[str]:
    """All hand-written prompts, then templates filled in turn, until there are `count` prompts or no template is left.

    Adds the prompts to `seen`. Raises ValueError if a hand-written prompt occurs twice.
    """
    prompts = []
    for text in handwritten:
        if normalised(text) in seen:
            raise ValueError(f"handwritten.jsonl holds this prompt twice, remove one: {text!r}")
        seen.add(normalised(text))
        prompts.append(text)
    templates = list(templates)
    while len(prompts) < count and templates:
        for template in list(templates):
            text = fresh(template, seen, rng)
            if text is None:
                templates.remove(template)  # its slots allow no more new prompts
            else:
                prompts.append(text)
    return prompts[:count]


def fresh(template: str, seen: set[str], rng: Random) -> str | None:
    """The template filled in a way not seen before, or None if TRIES draws do not give one. Adds it to `seen`."""
    for _ in range(TRIES):
        text = with_articles(fill(template, rng, {}))
        if normalised(text) not in seen:
            seen.add(normalised(text))
            return text
    return None


def fill(template: str, rng: Random, used: dict[str, set[str]]) -> str:
    """Replace slots such as {first} and {first2} by drawn values.

    A name is drawn once, the values of {first} and {first2} differ, and slots inside a value are filled too.
    """
    drawn: dict[str, str] = {}

    def value(match: re.Match) -> str:
        name, slot = match.group(0), match.group(1)
        if name not in drawn:
            drawn[name] = draw(slot, rng, used.setdefault(slot, set()))
            drawn[name] = fill(drawn[name], rng, used)
        return drawn[name]

    return re.sub(r"\{([a-z_]+)\d?\}", value, template)


def with_articles(text: str) -> str:
    """Replace "a" by "an" before a vowel, since templates have "a" before slots of any value."""
    return re.sub(r"\b([Aa])(?= (?!used|uni)[aeiouAEIO])", r"\1n", text)


def draw(slot: str, rng: Random, used: set[str]) -> str:
    source = SLOTS[slot]
    for _ in range(TRIES):
        value = source(rng) if callable(source) else rng.choice(source)
        if value not in used:
            break
    used.add(value)
    return value


def normalised(text: str) -> str:
    """Lowercase words and digits only, so prompts that differ in case or punctuation count as one."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def row_of(series: str, index: int, text: str, category: str = "") -> dict:
    name, category = f"{series}-{index:05d}", category or series
    return {"id": name, "category": category, "split": split_of(name), "messages": [{"role": "user", "content": text}]}


def split_of(name: str) -> str:
    point = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
    return "test" if point < 3 else "validation" if point < 6 else "train"


def sampled_turns(category: str, seen: set[str]) -> list[dict]:
    """User turns that sample_turns.py has sampled from the target, without those in `seen`."""
    turns = [json.loads(line) for line in (FOLDER / "sampled.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {
            "id": turn["name"],
            "category": category,
            "split": split_of(turn["name"]),
            "messages": [{"role": "user", "content": turn["content"]}],
        }
        for turn in turns
        if turn["category"] == category and normalised(turn["content"]) not in seen
    ]


def interleave(rows: dict[str, list[dict]], rng: Random) -> list[dict]:
    """Shuffle each category, then spread it evenly over the file: any prefix holds the categories in proportion."""
    placed = []
    for own in rows.values():
        order = rng.sample(own, len(own))
        placed += [((position + rng.random()) / len(order), row) for position, row in enumerate(order)]
    return [row for _, row in sorted(placed, key=lambda pair: (pair[0], pair[1]["id"]))]


def check(prompts: list[dict]):
    contents = [row["messages"][0]["content"] for row in prompts]
    assert len(prompts) >= sum(COUNTS.values())
    assert len({row["id"] for row in prompts}) == len(prompts)
    assert len({normalised(text) for text in contents}) == len(prompts)
    assert all(len(text.split()) <= 120 for text in contents)
    assert not any(re.search(r"\{[a-z_]+\d?\}", text) for text in contents)


# Slots: a list of choices, or a function of the random generator. A value may contain further slots.


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split("|")]


def number(low: int, high: int, step: int = 1) -> Callable[[Random], str]:
    return lambda rng: str(rng.randrange(low, high + 1, step))


def several(choices: list[str], low: int, high: int, joint: str = ", ") -> Callable[[Random], str]:
    return lambda rng: joint.join(rng.sample(choices, rng.randint(low, high)))


def numbers(count_low: int, count_high: int, low: int, high: int) -> Callable[[Random], str]:
    return lambda rng: ", ".join(str(x) for x in rng.sample(range(low, high + 1), rng.randint(count_low, count_high)))


def arithmetic_sequence(rng: Random) -> str:
    start, step = rng.randint(1, 60), rng.choice([2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 20, 25])
    return ", ".join(str(start + i * step) for i in range(4))


def geometric_sequence(rng: Random) -> str:
    start, ratio = rng.randint(1, 12), rng.choice([2, 3, 4, 5, 10])
    return ", ".join(str(start * ratio**i) for i in range(4))


def date(rng: Random) -> str:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1988, 2024)
    style = rng.choice(["{d} {m} {y}", "{m} {d}, {y}", "{y}-{n:02d}-{d:02d}"])
    return style.format(d=day, m=MONTHS[month - 1], n=month, y=year)


def email(rng: Random) -> str:
    first, last = rng.choice(FIRST).lower(), rng.choice(LAST).lower()
    return f"{first}{rng.choice(['.', '_', ''])}{last}@{rng.choice(['example.com', 'example.org', 'example.net'])}"


def clock(rng: Random) -> str:
    return f"{rng.randint(1, 12)}:{rng.choice(['00', '15', '30', '45'])} {rng.choice(['am', 'pm'])}"


def typed_fields(rng: Random) -> str:
    """A class name with some of its fields, as "Book with the fields title (str), pages (int)"."""
    name = rng.choice(sorted(ENTITIES))
    fields = pick_fields(name, rng)
    return f"{name} with the fields " + ", ".join(f"{field} ({kind})" for field, kind in fields)


def plain_fields(rng: Random) -> str:
    name = rng.choice(sorted(ENTITIES))
    return f"{name} with the fields " + ", ".join(field for field, _ in pick_fields(name, rng))


def table_columns(rng: Random) -> str:
    name = rng.choice(sorted(ENTITIES))
    return f"{name.lower()}s with the columns id, " + ", ".join(field for field, _ in pick_fields(name, rng))


def pick_fields(name: str, rng: Random) -> list[list[str]]:
    fields = [field.split(":") for field in ENTITIES[name].split()]
    return rng.sample(fields, rng.randint(3, min(5, len(fields))))


def record(rng: Random) -> str:
    """A line of facts, as "name: Ana Silva; age: 41; city: Porto"."""
    facts = {
        "name": "{person}",
        "age": str(rng.randint(18, 80)),
        "city": "{city}",
        "job": "{job}",
        "email": "{email}",
        "favourite colour": "{colour}",
        "pet": "{animal}",
        "hobby": "{hobby}",
        "start date": "{date}",
    }
    keys = ["name", *rng.sample([key for key in facts if key != "name"], rng.randint(2, 4))]
    return "; ".join(f"{key}: {facts[key]}" for key in keys)


def stock(rng: Random) -> str:
    """Items with counts and prices, as "4 pens at $2 each, 3 mugs at $7 each"."""
    items = rng.sample(PRODUCTS, rng.randint(3, 5))
    return ", ".join(f"{rng.randint(2, 40)} {item} at ${rng.randint(1, 30)} each" for item in items)


FIRST = words(
    "Ana|Ben|Carla|Dmitri|Elena|Farid|Grace|Hugo|Ines|Jonas|Keiko|Liam|Mona|Nadia|Oscar|Priya|Quentin|Rosa|Samir|Tara|Uma|Victor|Wendy|"
    "Xenia|Yusuf|Zoe|Amara|Bruno|Chloe|Diego|Esther|Felix|Gita|Hana|Ivan|Julia|Kofi|Lena|Marco|Nora|Omar|Petra"
)
LAST = words(
    "Silva|Novak|Okafor|Lindqvist|Tanaka|Moreau|Haddad|Kowalski|Byrne|Castillo|Dubois|Ferrari|Gupta|Hansen|Ivanov|Jensen|Klein|Larsen|"
    "Mbeki|Nakamura|Ortega|Patel|Quinn|Rossi|Schmidt|Turner|Ueda|Vargas|Walsh|Young|Zhang|Abbott|Bennett|Cho"
)
MONTHS = words("January|February|March|April|May|June|July|August|September|October|November|December")
CITIES = words(
    "Lisbon|Oslo|Nairobi|Kyoto|Lima|Toronto|Prague|Dublin|Cairo|Hanoi|Austin|Bergen|Porto|Seville|Turin|Utrecht|Zagreb|Perth|Quito|Leeds|"
    "Denver|Mumbai|Seoul|Athens|Vienna|Accra|Helsinki|Madrid|Boston|Chicago"
)
FRUITS = words(
    "apples|bananas|cherries|dates|figs|grapes|lemons|mangoes|oranges|pears|plums|peaches|kiwis|limes|melons|apricots|papayas"
)
ANIMALS = words(
    "cat|dog|horse|rabbit|parrot|turtle|fox|owl|bear|wolf|otter|hedgehog|penguin|dolphin|elephant|giraffe|lion|tiger|zebra|frog|mouse|"
    "squirrel|goat|duck|whale|kangaroo|koala|lizard|crab|bee"
)
COLOURS = words("red|blue|green|yellow|orange|purple|brown|black|white|grey|pink|teal|navy|silver|gold|beige")
PRODUCTS = words(
    "pens|mugs|notebooks|lamps|chairs|candles|posters|scarves|baskets|clocks|umbrellas|plates|towels|backpacks|keyboards|vases|blankets|"
    "headphones|bottles|frames|pillows|kettles|gloves|puzzles|rulers|folders|stickers|torches"
)
OBJECTS = words(
    "book|lamp|river|window|garden|bridge|candle|mountain|pencil|guitar|basket|castle|engine|feather|hammer|island|jacket|kettle|ladder|"
    "mirror|needle|ocean|pillow|quilt|ribbon|saddle|table|umbrella|violin|wagon|yarn|zipper|anchor|button|cloud|drum"
)
NUMBER_WORDS = words(
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|twenty|"
    "twenty-one|twenty-five|thirty|thirty-two|forty|forty-seven|fifty|fifty-six|sixty|seventy-three|eighty|ninety-nine"
)
ENTITIES = {
    "Book": "title:str author:str pages:int price:float in_print:bool isbn:str",
    "Car": "make:str model:str year:int mileage:float colour:str electric:bool",
    "Student": "name:str age:int grade:float email:str school:str enrolled:bool",
    "Employee": "name:str salary:float department:str manager:str active:bool office:str",
    "Product": "name:str price:float stock:int sku:str category:str on_sale:bool",
    "Order": "customer:str total:float quantity:int shipped:bool address:str created:str",
    "Movie": "title:str director:str year:int rating:float minutes:int genre:str",
    "Song": "title:str artist:str album:str seconds:int track:int explicit:bool",
    "House": "address:str bedrooms:int bathrooms:int area:float price:float garden:bool",
    "Recipe": "name:str servings:int minutes:int ingredients:list steps:list vegetarian:bool",
    "Flight": "number:str origin:str destination:str seats:int price:float delayed:bool",
    "Invoice": "number:str customer:str amount:float due_date:str paid:bool currency:str",
    "Task": "title:str description:str priority:int done:bool owner:str due_date:str",
    "Player": "name:str team:str score:int level:int health:float position:str",
    "Animal": "name:str species:str age:int weight:float habitat:str endangered:bool",
    "City": "name:str country:str population:int area:float mayor:str capital:bool",
    "Event": "title:str place:str start:str end:str capacity:int public:bool",
    "Account": "owner:str balance:float currency:str number:str closed:bool rate:float",
    "Plant": "name:str species:str height:float watering_days:int indoor:bool origin:str",
    "Ticket": "code:str seat:str price:float event:str used:bool row:int",
    "Message": "sender:str receiver:str subject:str body:str read:bool size:int",
    "Device": "name:str serial:str battery:int online:bool version:str location:str",
    "Course": "title:str teacher:str credits:int room:str hours:float full:bool",
    "Patient": "name:str age:int height:float weight:float doctor:str insured:bool",
    "Sensor": "name:str unit:str value:float interval:int enabled:bool place:str",
}
SLOTS: dict[str, list[str] | Callable[[Random], str]] = {
    "digit": number(2, 12),
    "teen": number(11, 29),
    "two": number(21, 99),
    "three": number(101, 999),
    "four": number(1001, 9899),
    "tens": number(20, 400, 20),
    "percent": number(5, 75, 5),
    "few": number(3, 6),
    "count": number(5, 12),
    "year": number(1950, 2023),
    "birth": number(1920, 1960),
    "running": number(75, 190),
    "price": lambda rng: f"${rng.randint(2, 95)}.{rng.choice(['00', '25', '50', '75', '99'])}",
    "speed": number(30, 120, 5),
    "hours": number(2, 9),
    "minutes": number(10, 55, 5),
    "angle": number(20, 85),
    "bottom": words("3|4|5|6|7|8|9|10|12"),
    "unknown": words("x|y|n|t|k|m"),
    "short_numbers": numbers(4, 6, 1, 40),
    "long_numbers": numbers(6, 9, 1, 99),
    "big_numbers": numbers(5, 7, 100, 999),
    "sequence": arithmetic_sequence,
    "powers": geometric_sequence,
    "first": FIRST,
    "person": lambda rng: f"{rng.choice(FIRST)} {rng.choice(LAST)}",
    "city": CITIES,
    "date": date,
    "email": email,
    "clock": clock,
    "morning": lambda rng: f"{rng.randint(7, 11)}:{rng.choice(['00', '15', '30'])} am",
    "phone": lambda rng: f"555-01{rng.randint(10, 99)}",
    "month": MONTHS,
    "weekday": words("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"),
    "fruit": FRUITS,
    "animal": ANIMALS,
    "colour": COLOURS,
    "product": PRODUCTS,
    "object": OBJECTS,
    "fruits": several(FRUITS, 4, 7),
    "animals": several(ANIMALS, 4, 8),
    "colours": several(COLOURS, 3, 6),
    "names": several(FIRST, 4, 8),
    "cities": several(CITIES, 4, 7),
    "products": several(PRODUCTS, 3, 6),
    "objects": several(OBJECTS, 4, 8),
    "number_words": several(NUMBER_WORDS, 4, 7),
    "mixed": several(FRUITS + ANIMALS + COLOURS, 6, 9),
    "stock": stock,
    "record": record,
    "typed_fields": typed_fields,
    "plain_fields": plain_fields,
    "table_columns": table_columns,
    "entity": sorted(ENTITIES),
    "job": words(
        "nurse|baker|teacher|plumber|architect|librarian|electrician|chemist|gardener|pilot|journalist|accountant|carpenter|designer|"
        "farmer|translator|mechanic|dentist|photographer|firefighter"
    ),
    "hobby": words(
        "painting|chess|hiking|knitting|cycling|pottery|gardening|bird watching|baking|swimming|photography|running|sewing|fishing|"
        "juggling|calligraphy|playing the guitar|stargazing|rock climbing|learning Spanish"
    ),
    "company": words(
        "Northwind Bikes|Bluefin Bakery|Cedar Software|Lantern Books|Maple Logistics|Orchid Foods|Pinecone Toys|Quartz Optics|"
        "Riverbend Farms|Summit Tools|Tidal Energy|Umber Coffee|Velvet Studio|Willow Clinic|Amber Travel|Copper Kitchen"
    ),
    "unit_pair": words(
        "kilometres to metres|metres to centimetres|kilograms to grams|hours to minutes|minutes to seconds|feet to inches|yards to feet|"
        "litres to millilitres|weeks to days|days to hours|dozens to single items|pounds to ounces|years to months|"
        "centimetres to millimetres|tonnes to kilograms|gallons to quarts"
    ),
    "operation": words(
        "the sum|the product|the maximum|the minimum|the average|the range (maximum minus minimum)|the number of even values|"
        "the number of odd values|the sum of squares|the median|a reversed copy|a sorted copy|a copy without duplicates|"
        "the running total|the second largest value|the differences between neighbours"
    ),
    "text_task": words(
        "counts the vowels|reverses the text|counts the words|returns the text in upper case|removes all spaces|"
        "checks whether it is a palindrome|returns the longest word|counts the lines|replaces spaces with underscores|"
        "returns the first letter of each word|counts each letter|swaps upper and lower case|removes punctuation|"
        "repeats the text three times|checks whether it contains only digits|splits it at commas|capitalises every word"
    ),
    "argument_name": words(
        "items|values|numbers|data|entries|scores|prices|readings|ages|lengths|weights|totals|samples|points|marks"
    ),
    "function_style": words(
        "Include a docstring.|Include a docstring and type hints.|Add a short example call.|Add two assert statements that test it.|"
        "Explain it in one sentence afterwards.|Use a for loop.|Keep it under ten lines.|Add a comment on each line."
    ),
    "script_task": words(
        "copies a file|counts the words in a file|renames files in a folder|converts a CSV file to JSON|prints a greeting|"
        "resizes an image|downloads a page|sorts the lines of a file|sends a message|searches a text for a word|"
        "makes a backup of a folder|prints a times table|merges two text files|converts temperatures|removes empty lines"
    ),
    "flags": several(
        words("--input|--output|--verbose|--limit|--name|--count|--format|--seed|--dry-run|--width|--quiet|--encoding"),
        3,
        4,
    ),
    "language": words("Python|JavaScript|Java|C|C++|Go|Rust|Ruby"),
    "selector": words(
        ".card|.button|#header|nav ul|.sidebar|footer|h1|table td|.alert|.gallery img|input[type=text]|.menu a|.badge|form label|.hero"
    ),
    "css": several(
        words(
            "a {colour} background|white text|rounded corners|a thin border|a soft shadow|16px padding|no margin|bold font|centred text|"
            "a hover effect|a maximum width of 600px|flex layout|a smooth transition|uppercase text|a line height of 1.5"
        ),
        3,
        4,
    ),
    "form": words(
        "contact|sign-up|login|feedback|newsletter|booking|checkout|survey|search|job application|password reset|delivery address"
    ),
    "inputs": several(
        words("name|email|phone|message|password|age|date|city|country|company|subject|a checkbox for terms"), 3, 5
    ),
    "program": words(
        "weather app|music player|to-do list|chat server|online shop|photo gallery|game|web server|backup tool|blog|calendar|"
        "fitness tracker|news reader|library system|parking meter|smart thermostat"
    ),
    "settings": several(
        words("host|port|debug|theme|language|timeout|max_users|log_level|volume|cache_size|units|refresh_minutes"),
        4,
        6,
    ),
    "enumeration": words(
        "the days of the week|the months of the year|the four seasons|traffic light colours|compass directions|playing card suits|"
        "order states|user roles|log levels|file types|planets of the solar system|chess pieces|T-shirt sizes|payment methods|"
        "weather conditions|HTTP methods|shapes|musical notes"
    ),
    "algorithm": words(
        "linear search|binary search|bubble sort|selection sort|insertion sort|the greatest common divisor|the factorial of a number|"
        "Fibonacci numbers|a prime test|a stack with push and pop|a queue with enqueue and dequeue|a linked list|counting letters|"
        "matrix addition|transposing a matrix|converting decimal to binary|the sum of digits|leap year test|a Caesar cipher"
    ),
    "exception": words(
        "a missing file|a division by zero|a missing dictionary key|an invalid number|an index out of range|bad JSON|a wrong type|"
        "a lost connection|a permission problem|an empty list"
    ),
    "topic": words(
        "the water cycle|how plants make food|gravity|the moon's phases|why leaves change colour|electricity|how magnets work|volcanoes|"
        "the rock cycle|rainbows|how bread rises|sleep|the human heart|vaccines|the internet|batteries|solar power|earthquakes|tides|"
        "inflation|recycling|how planes fly|sound waves|bees and pollination|glaciers|the seasons|food chains|how computers store data|"
        "compound interest|deserts|coral reefs|the printing press|bridges|clouds|muscles|the alphabet|maps|time zones|soil|insects"
    ),
    "audience": words(
        "a child|a curious teenager|a busy adult|a complete beginner|a classroom|a friend|a tourist|your grandmother"
    ),
    "pair": words(
        "cats and dogs|tea and coffee|books and films|trains and planes|cities and villages|summer and winter|rice and pasta|"
        "running and swimming|email and phone calls|paper maps and phone maps|lakes and oceans|frogs and toads|butter and olive oil|"
        "laptops and tablets|renting and buying|guitars and pianos|planets and stars|bacteria and viruses|lists and tuples in Python|"
        "football and basketball|painting and photography|stone and wood|weather and climate|fruit and vegetables"
    ),
    "goal": words(
        "sleep better|save money|drink more water|learn a language|read more books|get up earlier|make new friends|eat more vegetables|"
        "stay focused at work|spend less time on the phone|prepare for an exam|keep a tidy room|exercise regularly|"
        "feel less nervous on stage|be more patient|cook at home|manage time better|write every day|start a garden|remember names|"
        "learn to draw|walk more|plan a trip|settle in a new city"
    ),
    "feeling": words(
        "happy|tired|nervous|bored|excited|lonely|proud|curious|stressed|grateful|confused|hopeful|restless|cheerful"
    ),
    "cause": words(
        "I have a job interview tomorrow|my best friend moved away|I finished a long project|it has rained all week|I started a new job|"
        "I lost my keys|my garden is blooming|I passed my exam|my train was late|I got a new puppy|I baked my first bread|"
        "I have too much homework|my holiday starts tomorrow|my computer broke|I am moving house|I ran my first race"
    ),
    "setting": words(
        "a quiet village|a lighthouse|a space station|a deep forest|an old library|a busy market|a mountain hut|a harbour town|"
        "a night train|a bakery|a desert town|a castle|a school garden|a submarine|a museum|a rainy city"
    ),
    "trait": words(
        "brave|shy|clever|kind|forgetful|curious|stubborn|gentle|funny|patient|proud|careful|lazy|cheerful|lonely|honest"
    ),
    "value": words(
        "kindness|patience|courage|sharing|honesty|friendship|teamwork|hope|curiosity|forgiveness|hard work|gratitude"
    ),
    "thing": words(
        "bicycle|houseplant|laptop|pair of running shoes|used car|camera|mattress|backpack|coffee machine|winter coat|guitar|tent|desk|"
        "kitchen knife|bookshelf|phone|telescope|sewing machine|umbrella|watch"
    ),
    "dish": words(
        "vegetable soup|pancakes|tomato pasta|fried rice|banana bread|potato salad|lentil curry|omelette|apple pie|guacamole|"
        "mushroom risotto|chicken stew|fruit salad|bean tacos|oat cookies|pizza dough|grilled cheese|scrambled eggs|hummus|roast carrots|"
        "noodle stir-fry|lemonade|hot chocolate|garlic bread|rice pudding|pumpkin soup"
    ),
    "chore": words(
        "wash a car|change a light bulb|paint a fence|repot a plant|clean a bicycle chain|iron a shirt|wrap a present|sew on a button|"
        "set up a tent|pack a suitcase|clean a window|brew tea|plant tomatoes|fold a paper boat|back up a computer|write a letter|"
        "make a bed|hang a picture|sharpen a pencil|feed a cat|unclog a sink|descale a kettle|build a snowman|tie a tie|"
        "change a flat tyre|polish shoes|organise a bookshelf|make a sandwich"
    ),
    "occasion": words(
        "a birthday party|a camping weekend|a job interview|a school trip|moving house|a picnic|a beach day|a wedding|a long flight|"
        "a dinner for six|a new baby|a garage sale|a hiking day|a first day at school|a product launch|a book club|a winter storm"
    ),
    "meeting": words(
        "project kick-off|weekly team|budget review|sales planning|parents' evening|book club|design review|hiring|safety|volunteer|"
        "marketing|release planning|customer feedback|neighbourhood|training"
    ),
    "request": words(
        "asking for a day off|confirming an appointment|thanking them for a gift|inviting them to lunch|asking about an invoice|"
        "apologising for a late reply|announcing a new office|asking for a recommendation|cancelling a subscription|"
        "reporting a broken printer|welcoming them to the team|asking to move a meeting|sharing good news|requesting a refund|"
        "reminding them of a deadline|offering help with a project|asking for feedback|congratulating them on a promotion"
    ),
    "choice": words(
        "working from home|owning a pet|living in a big city|learning online|buying a used car|having a garden|cycling to work|"
        "studying abroad|shopping online|waking up early|wearing a school uniform|reading e-books|eating out|having a large family|"
        "travelling alone|using public transport|a four-day work week|keeping a diary|renting a flat|starting a business|solar panels"
    ),
    "venue": words(
        "the town hall|the main library|Room 12|the community centre|the old theatre|the north campus|the city museum"
    ),
    "event": words(
        "a book fair|a pottery workshop|a jazz concert|a coding class|a charity dinner|a plant market|a chess tournament|a film night|"
        "a cooking course|a photo exhibition|a town meeting|a job fair"
    ),
    "note": words(
        "On {date}, {person} from {company} ordered {count} {product} and {few} {product2} for {price} in total. "
        "The delivery goes to {city}, and questions can be sent to {email}.|"
        "{person} will host {event} at {venue} in {city} on {date}. It starts at {clock} and tickets cost {price}. "
        "To book, call {phone} or write to {email}.|"
        "{person}, a {job} from {city}, joined {company} on {date}. {person2}, who lives in {city2}, will be the new manager.|"
        "The meeting between {person} and {person2} was moved from {weekday} to {weekday2} at {clock}. "
        "It takes place at {venue}, and {person3} will take notes.|"
        "{company} opened a shop in {city} in {year}. Today it has {two} employees, sells {product} and {product2}, "
        "and is led by {person}. The office phone number is {phone}.|"
        "Last {weekday}, {first} bought {count} {fruit} and {digit} {fruit2} at a market in {city} for {price}. "
        "{first2} came along and bought {few} {product}.|"
        "Patient {person} visited Willow Clinic on {date} at {morning}. The next visit is in {few} weeks with {person2}. "
        "The contact number is {phone}.|"
        "The {colour} bicycle was found near {venue} in {city} on {date}. The owner, {person}, can call {phone} or write to {email}.|"
        "Flight {three} from {city} to {city2} leaves at {clock} on {date}. {person} has seat {teen}A and paid {price}.|"
        "{person} was born in {city} in {birth}, worked as a {job}, and loved {hobby}. Their neighbour {person2} was a {job2} from {city2}."
    ),
    "simple": words(
        "The {colour} {animal} sat near the {object}.|{first} put the {object} next to the {object2}.|"
        "Every {weekday}, {first} buys {fruit} in {city}.|A {animal} and a {animal2} crossed the old bridge.|"
        "{first} painted the {object} {colour} in {month}.|My friend {first} has a {colour} {object} and a small {animal}.|"
        "The {job} from {city} carried a {object} and {count} {product}.|We saw {count} {product} and a {animal} at the market.|"
        "{first} and {first2} met a {trait} {animal} in {city}.|In {month}, the {job} gave {first} a {colour} {object}."
    ),
    "output_form": words(
        "a JSON object|a bullet list|a numbered list|a markdown table with the columns Field and Value|lines of the form key: value|"
        "a CSV with a header line|a YAML block|an HTML list"
    ),
    "order": words("alphabetically|in reverse alphabetical order|from shortest to longest word"),
    "list_form": words(
        "a numbered list|a bullet list|a JSON array|an HTML unordered list|a markdown checklist|a Python list"
    ),
    "foreign": words("Spanish|French|German|Italian|Portuguese"),
    "review": words(
        "The {product} arrived in {city} after {count} days and one was broken.|"
        "I love these {colour} {product}, and so does my friend {first}.|"
        "The {product} are fine but {price} is too much.|{company} answered my question within {minutes} minutes. Great service!|"
        "The {job} was friendly but came {hours} hours late.|My {animal} enjoyed the {colour} {object} more than I did.|"
        "I bought {few} {product} from {company} and would not do it again."
    ),
}

TEMPLATES = {
    "math": [
        "Compute {two} + {two2} step by step.",
        "Compute {three} + {three2} step by step, showing the carry in each column.",
        "Work out {three} - {two} step by step.",
        "Calculate {teen} x {digit} by splitting {teen} into tens and ones. Show each step.",
        "What is {two} times {digit}? Show your working and state the answer on the last line.",
        "Divide {three} by {digit}. Give the quotient and the remainder, with working.",
        "Write the multiplication table of {teen} from 1 to {count}.",
        "List the multiplication table for {two}, one line per product, up to {two} x {count}.",
        "Count from {two} to 120 in steps of {digit}. Write the numbers separated by commas.",
        "Count backwards from {three} in steps of {digit} and write {count} numbers.",
        "Starting from {three}, add {digit} again and again. List the first {count} results.",
        "What are the next {few} numbers in the sequence {sequence}? Explain the rule.",
        "Continue the pattern {powers} for {few} more terms and say what the rule is.",
        "Give the 10th term of the arithmetic sequence {sequence}. Show the formula and the steps.",
        "Make a conversion table for {unit_pair}, from 1 to {count}.",
        "Make a markdown table that converts {digit}, {teen} and {two} from {unit_pair}.",
        "Convert {digit} hours and {minutes} minutes to minutes. Explain each step.",
        "Convert {three} minutes to hours and minutes. Show the steps.",
        "Find the average of {short_numbers}. Show the sum first, then divide.",
        "Find the median of these numbers: {long_numbers}. Sort them first.",
        "Find the smallest, the largest and the range of {long_numbers}.",
        "Sort these numbers from smallest to largest: {long_numbers}.",
        "Sort the numbers {big_numbers} from largest to smallest and write one number per line.",
        "Which of these numbers are even and which are odd: {long_numbers}? Make two lists.",
        "For each number in {short_numbers}, write its double on its own line.",
        "Write the square of each of these numbers, one per line: {short_numbers}.",
        "Add up {short_numbers} one number at a time, writing the running total after each step.",
        "What is {percent}% of {tens}? Show the steps.",
        "A jacket costs ${tens}. It is reduced by {percent}%. What is the new price? Show your working.",
        "Increase {tens} by {percent}%. Explain step by step.",
        "{first} has {two} {product} and buys {teen} more. Then {first} gives away {digit}. How many {product} are left?",
        "{first} buys {digit} {product} for ${teen} each. How much does {first} pay, and how much change is there from $400?",
        "A shop sells {stock}. What is the total value? Work it out item by item.",
        "A train travels at {speed} km per hour for {hours} hours. How far does it go? Show the formula.",
        "A car drives {three} km in {hours} hours. What is its average speed? Show the calculation.",
        "Solve for {unknown}: {digit}{unknown} + {teen} = {three}. Show each step.",
        "Solve {unknown} + {two} = {three} and check your answer.",
        "Solve {unknown} / {digit} = {teen}. Explain what you do to both sides.",
        "Find the area and the perimeter of a rectangle that is {teen} cm long and {digit} cm wide.",
        "A square has a side of {two} cm. Find its perimeter and its area, step by step.",
        "A triangle has a base of {two} cm and a height of {digit} cm. What is its area?",
        "A box measures {digit} cm by {teen} cm by {digit2} cm. What is its volume?",
        "Two angles of a triangle are {angle} and {angle2} degrees. Find the third angle and explain.",
        "Add the fractions {digit}/{bottom} and {digit2}/{bottom2}. Show the common denominator.",
        "List all factors of {two} in order.",
        "List the first {count} multiples of {two}.",
        "Find the greatest common divisor of {two} and {three} with the Euclidean algorithm.",
        "Is {three} a prime number? Check it by trying small divisors one by one.",
        "Write the prime factorisation of {three} step by step.",
        "Write {four} in expanded form, digit by digit, then in words.",
        "Write these numbers in words, one per line: {short_numbers}.",
        "Round {four} to the nearest ten, hundred and thousand.",
        "Compare {three} and {three2}: which is larger and by how much? Explain.",
        "Write {two} in binary. Show each division by 2.",
        "Make a table with the columns n, n squared and n cubed for n from {digit} to {teen}.",
        "{first} saves ${digit} every week. Make a table of the total savings for weeks 1 to {count}, starting from ${two}.",
        "A plant is {two} cm tall and grows {digit} cm a week. List its height for each of the next {count} weeks.",
        "Share {three} {product} equally among {digit} people. How many does each get and how many are left over?",
        "A bag has {digit} {colour} balls and {teen} {colour2} balls. What is the chance of drawing a {colour} ball? Explain.",
        "Evaluate {teen} + {digit} x {digit2} - {few} and name the order of operations you use.",
        "Evaluate f(x) = {digit}x + {teen} for x = 0, 1, 2, 3, 4 and 5. Write one line per value.",
        "A film starts at {clock} and lasts {running} minutes. When does it end? Show the steps.",
        "{first} reads {teen} pages a day. How many days does a book of {three} pages take? Show the division.",
    ],
    "code": [
        "Write a Python dataclass {typed_fields}.",
        "Write a Python dataclass {typed_fields}. Add a docstring and create one example instance.",
        "Write a Python class {plain_fields}. Include an __init__ method and a __repr__ method.",
        "Write a Python class {plain_fields}, with a getter and a setter for each field.",
        "Write a Python class {plain_fields}. Use @property for every field.",
        "Write a Python class {typed_fields}. Add a method to_dict that returns all fields.",
        "Write a Python class {plain_fields}. Add an __eq__ method that compares all fields.",
        "Write a Java class {plain_fields}. Include a constructor, getters and setters.",
        "Write a JavaScript class {plain_fields}. Include a constructor and a toString method.",
        "Write a TypeScript interface {typed_fields}.",
        "Write a C struct for a {plain_fields}, and a function that prints it.",
        "Write a SQL CREATE TABLE statement for a table {table_columns}.",
        "Write a SQL CREATE TABLE statement for a table {table_columns}. Then add two INSERT statements with made-up values.",
        "Write {few} SQL INSERT statements for a table {table_columns}.",
        "Write a SQL SELECT query for a table {table_columns}. Sort the result by the last column and limit it to {count} rows.",
        "Give an example JSON object for a {plain_fields}.",
        "Write a JSON array with {few} made-up entries, each a {plain_fields}.",
        "Write a JSON configuration file for a {program} with the settings {settings}.",
        "Write a YAML configuration file for a {program} with the settings {settings}.",
        "Write a Python dictionary with the default settings {settings} for a {program}, and a function that prints them all.",
        "Write a Python function that takes a list called {argument_name} and returns {operation}. {function_style}",
        "Write a {language} function that returns {operation} of a list of integers called {argument_name}.",
        "Write a Python function that takes a string and {text_task}. {function_style}",
        "Write a {language} function that takes a string and {text_task}.",
        "Write unit tests with unittest for a Python function that takes a string and {text_task}. Name the test class Test{entity}Text.",
        "Write three pytest tests for a function that takes the list {argument_name} and returns {operation}.",
        "Write a Python script with argparse that {script_task}. It takes the options {flags}.",
        "Write a Python script that {script_task}, with a main function and an if __name__ guard.",
        "Write an HTML form for a {form} page with the fields {inputs} and a submit button.",
        "Write an HTML table with the header row Name, {entity}, City and {few} rows of made-up data about {names}.",
        "Write an HTML page with the title {company}, a heading, a paragraph about {product} and a link.",
        "Write an HTML unordered list of {fruits}.",
        "Write a CSS rule for {selector} with {css}.",
        "Write CSS rules for {selector} and {selector2}. The first has {css}.",
        "Write a Python Enum for {enumeration}. Add a loop that prints every member.",
        "Write a {language} enum or constants for {enumeration}.",
        "Write a Python for loop that prints the numbers from {digit} to {two} in steps of {few}, and show the output.",
        "Write a Python loop that prints each item of the list [{objects}] with its index, and show the output.",
        "Write a Python program that prints the multiplication table of {two} up to {count}.",
        "Create a Python list with {animals} and print it sorted, reversed and in upper case.",
        "Create a Python dictionary that maps {names} to made-up ages, then print every pair.",
        "Use a list comprehension in Python to get the numbers from 1 to {two} that are divisible by {few}. Show the result.",
        "Implement {algorithm} in {language}. Add short comments.",
        "Write a Python try/except block that handles {exception} in a program for a {program}.",
        "Write a Python function that reads a CSV file with the columns of a {plain_fields}, and returns a list of dictionaries.",
        "Write a function in Python that converts {unit_pair}, and print a table for 1 to {count}.",
        "What does this Python code print? Explain line by line.\n\nvalues = [{short_numbers}]\ntotal = 0\nfor value in values:\n"
        "    total += value\n    print(value, total)",
        "What does this Python code print?\n\nfor i in range({digit}, {teen}, {few}):\n    print(i, i * {digit2})",
        "Rename the variable x to {argument_name} in this code and write the whole code again:\n\nx = [{short_numbers}]\n"
        "for item in x:\n    print(item)\nprint(len(x), sum(x))",
        "Add a docstring and type hints to this function and write it out again:\n\ndef scale({argument_name}, factor={digit}):\n"
        "    result = []\n    for item in {argument_name}:\n        result.append(item * factor + {teen})\n    return result",
        "Rewrite this loop as a list comprehension:\n\nresult = []\nfor n in range({teen}, {three}):\n    if n % {few} == 0:\n"
        "        result.append(n * {digit})",
        "Write a Bash script that {script_task}. Add a comment above each command.",
        "Write a small Flask app for a {program} with routes to list, show and add a {entity}.",
        "Write a Markdown README for a {program} made by {company}, with sections Install, Usage and License.",
        "Write a Python class {entity}List with the methods add, remove, find and count.",
    ],
    "chat": [
        "Explain {topic} to {audience}.",
        "Explain {topic} to {audience} in {few} short sentences.",
        "Give me {few} interesting facts about {topic}.",
        "What is the most common misunderstanding about {topic}, and what is the truth?",
        "Why does {topic} matter in everyday life for a {job}?",
        "What is the difference between {pair}? Give {few} points.",
        "Which would you recommend to a {job}: {pair}? Explain why.",
        "How can I {goal}? Give me {few} tips.",
        "I am a {job} and I want to {goal}. What should I do first?",
        "My friend {first} wants to {goal}. What advice would you give?",
        "I want to {goal} before {month}. Can you suggest a simple weekly plan?",
        "I feel {feeling} today because {cause}. Can you say something helpful?",
        "Hi! I feel {feeling}, mostly because {cause}. What would you do?",
        "Write a short story about a {trait} {animal} in {setting}.",
        "Write a short story about {first}, a {trait} {job} who lives in {setting}. End with a lesson about {value}.",
        "Tell me a bedtime story about a {animal} and a {animal2} who learn about {value}.",
        "Write a short dialogue between a {job} and a {animal} in {setting}.",
        "Write a four-line poem about a {colour} {object} in {setting}.",
        "What should I think about when I buy a {thing}? I can spend about ${tens}.",
        "Can you recommend a present for {first}, who is a {job} and likes {hobby}?",
        "I would like to try {hobby}. How do I start, and what do I need?",
        "What does a {job} do on a typical {weekday}?",
        "What are the best and the hardest parts of being a {job} in {setting}?",
        "I have a free {weekday} in {city}. What could I do with my {animal} or my friends?",
        "What would the world be like without {topic}? Imagine it for {audience}.",
        "Give me {few} questions I could ask a {job} about {hobby} and work.",
        "Suggest {count} names for a {trait} {animal}.",
        "Suggest {few} names for a shop in {city} that sells {product}, and explain each.",
        "Tell me a clean joke about a {animal} and a {job}, then explain why it is funny.",
        "Write a thank-you message to {first}, who helped me to {goal}.",
        "What is a good conversation starter at {occasion}? Give me {few} ideas for someone who feels {feeling}.",
        "I am writing about {value}. Can you explain what it means and give an example with a {animal}?",
    ],
    "instruction": [
        "Write step-by-step instructions on how to {chore} for {audience}.",
        "List {few} steps to {chore}, each in one sentence.",
        "Write a checklist with {count} items before you {chore}.",
        "What do I need to {chore}, and what mistakes should I avoid? Use two short lists.",
        "Write a simple recipe for {dish} for {digit} people. List the ingredients first, then the steps.",
        "Give me a recipe for {dish} that takes at most {minutes} minutes.",
        "Write a shopping list for {dish} and {dish2}.",
        "Plan a menu for {occasion} that includes {dish} and {dish2}.",
        "Write a checklist for {occasion} with {count} items.",
        "Make a packing list for {occasion} in {month}, grouped under {few} headings.",
        "Make a timetable for {occasion}, starting at {morning}, with {few} entries.",
        "Write a short email to {person} {request}.",
        "Write a polite email from {first} to {person} at {company} {request}. Include a subject line.",
        "Write a two-sentence text message to {first} {request}.",
        "Write a formal letter from {person} to {company} {request}.",
        "Write an agenda for a {meeting} meeting on {weekday} at {morning} with {few} items.",
        "Write an agenda for a {minutes}-minute {meeting} meeting led by {first}. Give each item a time.",
        "Write short minutes of a {meeting} meeting attended by {names}.",
        "List {few} pros and {few} cons of {choice}.",
        "Make a markdown table of the pros and cons of {choice} for a {job}.",
        "Compare {pair} in a markdown table with {few} rows.",
        "Write {few} tips to {goal}, as a numbered list. Start each tip with a verb.",
        "Write a plan for {few} days to {goal}. Use one line per day.",
        "Write a weekly schedule, Monday to Sunday, for a {job} who wants to {goal} and enjoys {hobby}.",
        "Write a short product description for {colour} {product} sold by {company}.",
        "Write a job advert for a {job} at {company} in {city}. Use three bullet lists.",
        "Write an invitation to {event} at {venue} in {city} on {date} at {clock}.",
        "Write a short notice for the door of {company}: closed on {date}, open again on {weekday} at {morning}.",
        "Write {few} quiz questions with answers about {topic}.",
        "Write {few} true-or-false statements about {topic}, and mark each one.",
        "Write an outline for a talk about {topic} for {audience}, with {few} sections.",
        "Write a summary of {topic} in exactly {few} bullet points for {audience}.",
        "Write {few} sentences that each contain the words {object} and {animal}.",
        "Write the rules of a simple game that uses a {object} and {count} {product}.",
        "Write a to-do list for {first}, a {job} who wants to {chore} and {chore2} on {weekday}.",
        "Write a frequently-asked-questions section with {few} questions for {company}, which sells {product}.",
        "Write a short biography of {person}, a {job} from {city} who loves {hobby}.",
        "Write a phone script for {company} about an order of {count} {product} that arrives on {weekday}.",
    ],
    "extraction": [
        "Extract all names of people from this text as a bullet list.\n\n{note}",
        "Extract the facts in this text as {output_form}.\n\n{note}",
        "Read the text and return a JSON object with the keys people, places, dates and numbers.\n\n{note}",
        "List every number in the text with the thing it counts or measures.\n\n{note}",
        "Who, where and when? Answer in three lines.\n\n{note}",
        "Copy the text below exactly.\n\n{note}",
        "Copy the text below, but write every name of a person in capital letters.\n\n{note}",
        "Summarise the text in one sentence, then list its key facts as {output_form}.\n\n{note}",
        "Rewrite the text as a bullet list with one fact per bullet.\n\n{note}",
        "Write three questions about the text and answer each of them.\n\n{note}",
        "Find the email addresses and phone numbers, if there are any, in the following text. Return {output_form}.\n\n{note} {note2}",
        "Turn this record into {output_form}: {record}",
        "Turn these records into a markdown table.\n\n{record}\n{record2}",
        "Turn these records into a JSON array.\n\n{record}\n{record2}",
        "Write one sentence that contains every fact of this record: {record}",
        'Convert this JSON to a markdown table with the columns Key and Value: {"name": "{person}", "city": "{city}", '
        '"job": "{job}", "age": {two}, "hobby": "{hobby}"}',
        "Convert this CSV to JSON.\n\nname,city,age\n{first},{city},{two}\n{first2},{city2},{two2}\n{first3},{city3},{two3}",
        "Convert this CSV to a markdown table.\n\nitem,colour,price\n{product},{colour},{price}\n{product2},{colour2},{price2}\n"
        "{product3},{colour3},{price3}",
        "Make a markdown table with the columns Item, Count and Price from this text: {stock}.",
        "Turn this stock list into a JSON array of objects with the keys item, count and price: {stock}.",
        "Sort these words {order}: {objects}.",
        "Alphabetise these names and write one name per line: {names}.",
        "Sort these animals {order} and number them: {animals}.",
        "Write these cities as {list_form}: {cities}.",
        "Write these items as {list_form}: {products}, {fruits}.",
        "Group these words into fruits, animals and colours: {mixed}.",
        "Make a markdown table with the columns Word and Number of letters for: {objects}.",
        "Write the number words as digits, one per line: {number_words}.",
        "Translate these number words to {foreign}: {number_words}.",
        "Translate these colours to {foreign}, one per line: {colours}.",
        "Repeat this sentence {few} times: {simple}",
        "Copy this sentence {few} times and number the copies: {simple}",
        "Copy these sentences, but replace every colour with {colour}.\n\n{simple}\n{simple2}\n{simple3}",
        "Rewrite each sentence in capital letters.\n\n{simple}\n{simple2}\n{simple3}",
        "Rewrite each sentence as a question.\n\n{simple}\n{simple2}",
        "Rewrite these sentences in the future tense, one per line.\n\n{simple}\n{simple2}\n{simple3}",
        "List the nouns in each sentence.\n\n{simple}\n{simple2}\n{simple3}",
        "Copy the text and change {first} to {first2} everywhere: {first} lives in {city}. {first} is a {job}. {first} likes {hobby} "
        "and {first} has a {animal}.",
        "Repeat the list three times, each time with the first item moved to the end: {animals}.",
        "Is each review positive, negative or mixed? Repeat each review and add your answer.\n\n1. {review}\n2. {review2}\n3. {review3}",
        "Return a JSON object with the keys sentiment, product and reason for this review: {review}",
        "Remove the duplicates from this list and write it as {list_form}: {fruits}, {fruit}, {fruits2}.",
        "Put these events in order of time, earliest first.\n\n{first}: {date}\n{first2}: {date2}\n{first3}: {date3}",
        "Write each date in the form YYYY-MM-DD: {date}; {date2}; {date3}; {date4}.",
        "For each email address give the user name and the domain: {email}, {email2}, {email3}.",
    ],
}


if __name__ == "__main__":
    main()
