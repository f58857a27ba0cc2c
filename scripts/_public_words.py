"""Frames and word lists of the public text, all written for dpllm. `_public_text.py` makes documents of them.

Bound for a whole document: hero, heroine, town, key (a code), item. Numbers: d1 to d8, n, year,
code, clock, day. Lists are written "this; that".
"""

from __future__ import annotations

TOPICS: dict[str, list[str]] = {
    "weather": [
        "{sky} over {town} [early ]on {weekday}, with a top of {n} degrees.",
        "Expect {rainfall} {part} and {wind} winds near the {landform}.",
        "The {landform} above {place} had {rainfall} all {part}.",
        "Gusts of {d2} miles an hour shook the {building} at {town}.",
        "{sky} will spread from the {compass}, clearing {part}.",
        "Station {key} measured {d2}.{d1} millimetres by {clock}.",
        "Sailors off {place} are told to expect a(n) {wind} swell.",
        "Ice is likely in the {landform}s, so cover your {plant}.",
        "It has not been this {feel} since {year}.",
        "{weekday} looks {feel}; {weekday} looks {feel} too.",
    ],
    "kitchen": [
        "Chop {n} {vegetable} and fry them in {fat} until {cooked}.",
        "Add {d3} grams of {grain}, stir, and leave the pan for {n} minutes.",
        "Heat the oven to 2{d2} degrees and grease a(n) {size} tin.",
        "Serve it {cooked}, with {vegetable}, {fat} and a pinch of {spice}.",
        "{hero} taught me to fold the {spice} in last.",
        "If the {dish} turns out too {taste}, a little {spice} will fix it.",
        "For {n} people you need {n} {vegetable}, one {dish} tin and some patience.",
        "Whisk the eggs with {spice}; do not hurry.",
        "This {dish} keeps for {n} days under a cloth.",
        "My neighbour in {town} makes a(n) {taste} {dish} out of {vegetable}.",
        "Rinse the {grain} twice, drain it, then simmer with {spice}.",
    ],
    "garden": [
        "Sow {plant} in {month}, about {n} inches apart.",
        "Water the {plant} {part} and keep off the slugs.",
        "Our {plant} won second prize at the {town} show.",
        "{hero} digs ash from the stove into the {soil} soil.",
        "Prune the {plant} hard once the {colour} flowers fade.",
        "In {soil} ground {plant} want shade and grit.",
        "The {bird} ate every {colour} berry by {month}.",
        "Packet {key}: {plant}, {colour}, height {d2} centimetres.",
        "Lift the bulbs, dry them, and store them in the {building}.",
        "A(n) {feel} spring suits {plant} better than a(n) {feel} one.",
    ],
    "travel": [
        "The {vehicle} to {town} leaves at {clock} from platform {n}.",
        "Change at {place} for the {vehicle} to the {landform}.",
        "We crossed the {landform} by {vehicle} and slept in a(n) {building}.",
        "Service {d3} does not call at {town} on {weekday}s.",
        "From {place} it is {d2} miles by {vehicle} or {n} hours on foot.",
        "Keep ticket {key}; the guard at {place} will ask for {key} again.",
        "The road bends {compass} past a(n) {size} {building} and a field of {plant}.",
        "{heroine} missed the {clock} and waited for the {clock}.",
        "Bring a map, since the path above {town} is {feel} and badly signed.",
        "Departures: {place} {clock}, {place} {clock}, {town} {clock}.",
        "Fares rise on the {day} of {month}, from {d1}.{d2} to {n}.{d2}.",
    ],
    "sport": [
        "{town} beat {place} by {n} points to {d1} on {weekday}.",
        "{heroine} scored {n} goals before the break.",
        "The {animals} lead the league with {d2} points from {n} games.",
        "After {n} laps {hero} was {d2} seconds ahead.",
        "The final at {town} starts at {clock}, rain or shine.",
        "Coach {last} praised a(n) {mood} defence and a(n) {mood} crowd.",
        "Runner {d3} finished in {d2}:{d2}, a record for {place}.",
        "{hero} threw the {item} further than anyone since {year}.",
        "A crowd of {d5} watched the {animals} draw.",
        "The referee, {heroine}, sent two players off.",
    ],
    "shop": [
        "For sale: {colour} {thing}, {size}, hardly used, {d2} crowns.",
        "Lost near {town}: a(n) {colour} {thing}. Reward of {d2} crowns.",
        "The {trade} in {place} is closed until the {day} of {month}.",
        "Ask for {hero} at the {trade}, counter {n}.",
        "Order {key} is ready: {n} {things}, {colour}.",
        "Buy two {things} and get a(n) {thing} free this {weekday}.",
        "Please quote {letters}-{key} in every letter about your {item}.",
        "We fix {things} while you wait, except on {weekday}s.",
        "Wanted: {mood} helper for the {trade}; write to box {d4}, {town}.",
        "Stock list: {d3} {things}; {d2} {things}; {n} {things}.",
        "Open {clock} to {clock}, and {clock} to {clock} on {weekday}s.",
    ],
    "museum": [
        "Cabinet {n} holds a(n) {material} {thing} found near {town} in {year}.",
        "The {material} {thing} was made by {heroine} around {year}.",
        "Shelf mark {letters} {d3}.{d2}: {subject} in {n} volumes.",
        "Readers may keep books on {subject} for {n} weeks.",
        "A talk on {subject} by {heroine} begins at {clock}.",
        "Object {key}, {material}, {d2} by {d2} centimetres, gift of {heroine}.",
        "Nobody knows why the {building} at {place} was painted {colour}.",
        "Do not touch the {material}; it is {feel} and very old.",
        "The library at {town} lends {things} as well as books about {subject}.",
        "A(n) {size} {thing} (number {key}) is missing from the catalogue.",
        "Built in {year}, burnt in {year}, the {building} now houses {subject}.",
    ],
    "story": [
        "Once a(n) {mood} {animal} lived under the {building} by the {landform}.",
        "{hero} had a(n) {colour} {item} and would not lend it.",
        '"Where is my {item}?" asked {hero}.',
        '"It is in the {building}," said the {animal}, looking {mood}.',
        "So they walked {compass} until they met a(n) {mood} {animal}.",
        "{hero} and the {animal} shared a(n) {dish} and told tales of {place}.",
        "That night the {animal} dreamt of {things} and {vegetable}.",
        "But the {item} was gone, and {hero} felt {mood}.",
        "At last the {animal} gave back the {item}, and all {place} cheered.",
        "Every {weekday} {hero} would climb the {landform} to watch the {bird}.",
        "{first} was older than {hero} and far more {mood}.",
        "Nobody in {town} believed her, least of all the {animal}.",
        "He never spoke of the {item} again, though he kept it by his bed.",
    ],
    "manual": [
        "To open the {item}, press the {colour} button {n} times.",
        "Step {n}: fit the {part_of} to the {part_of} with {n} screws.",
        "The serial number of this {item} is {key}.",
        "If the {item} hums, switch it off and clean the {part_of}.",
        "Type {key} and turn the {part_of} to the left.",
        "Never oil the {part_of} while the {item} is hot.",
        "Spare {part_of}: part {letters}{d4}. Spare {part_of}: part {letters}{d3}.",
        "The new password is {lowcode}; the old one was {lowcode}.",
        "Set the dial to {d2}, wait {n} seconds, then read the {part_of}.",
        "Batteries last {n} months; replace both when the lamp turns {colour}.",
        "Your code is {key}. Do not write {key} on the {item}.",
    ],
    "club": [
        "{heroine} of {place} chairs the {town} {subject} circle.",
        "Members meet on the {day} of each month at the {building}.",
        "Minutes: {first} read the accounts, {first} made tea, {first} slept.",
        "New member {d4}: {heroine}, keen on {subject}.",
        "The raffle was won by ticket {key}, held by {hero}.",
        "Ring {d3} {d4} or write to {heroine}, {n} {place} Row.",
        "Next {weekday} {hero} shows slides of the {landform} at {place}.",
        "Subscriptions are {n} crowns, due by the {day} of {month}.",
        "She plays the {instrument} and her cousin the {instrument}.",
        "The choir needs a(n) {mood} {instrument} player who can count to {n}.",
        "Votes: {last} {d2}, {last} {d2}, {last} {n}.",
        "Locker {d2} opens with {key}; tell no one but {hero}.",
    ],
    "nature": [
        "The {bird} nests in {month} and lays {n} {colour} eggs.",
        "A(n) {animal} can smell {vegetable} from {d2} yards.",
        "Walkers counted {d3} {animals} along the {landform} in {year}.",
        "{plant} grow wild between {place} and {place}.",
        "The {landform} is {n} miles long and seldom {feel}.",
        "Ringed {bird} {letters}{d5} was seen again at {town}.",
        "{animals} sleep {part}; the {bird} sings instead.",
        "Look for {colour} moss on the {compass} side of each {building}.",
        "Few {animals} are left on the {landform}, perhaps {d2}.",
        "Why the {bird} turns {colour} is still a matter for {subject}.",
    ],
    "work": [
        "The {trade} pays {d3} crowns a week and feeds its staff {dish}.",
        "Invoice {key}: {n} {things} at {d2}.{d2}, total {d4}.{d2}.",
        "{heroine} drove the {vehicle} from {place} with {d3} {things} aboard.",
        "The {building} took {n} years and {d5} bricks.",
        "Our {trade} will move from {place} to {town} in {month}.",
        "Parcel {key} went {compass} by {vehicle} and came back {feel}.",
        "He mends {things}, she paints {things}, and both dislike {vegetable}.",
        "Delivery: gate {n}, {town}, {weekday}, not before {clock}.",
        "Results: {subject} {d2}, {subject} {d2}, {subject} {d2}.",
        "Signed, {heroine}, {trade}, {town}.",
        "Account {key} belongs to {hero}; account {code} does not.",
    ],
    "log": [
        "{mister} {last} ({d7}) left a(n) {colour} {item}[, {fault}].",
        "{last}, {first}: {item} {fault}, {fault}. Ring {d3}-{d3}-{d4}.",
        "Back on the bench: {item} of {mister} {first} {last}, {fault}.",
        "{weekday}, {clock}. {part_of} {fault}; {part_of} {fault}; {verdict}.",
        "Owner {last} says that it is {fault} whenever the yard is {feel}.",
        "Fitted {part_of} {letters}{d2}, {d2} mm. {verdict}.",
        "To do: {gerund} the {part_of}, then the {part_of}, by {day} {month}.",
        "Found on the {vehicle} at {clock}: {item}, {material}, {fault}.",
        "Still {fault}, still {fault}. {verdict}.",
        "{d2}/{d2} on the gauge, {part_of} at {n}.{d1}, oil {d2}.",
        "{mister} {last}, {trade}, {n} {place} Row, wants it by {weekday}.",
        "Fixed twice since {month}, first by {last}, then by {mister} {last}.",
        "{verdict}. {initials}",
        "Ship's log {n}: wind {compass}, {verdict}, cook {mood}.",
        "Swapped the {part_of} for one from {last} and {last}; {verdict}.",
        "Said to have been his {relative_of}'s. Marked {letters}-{code}.",
    ],
}

LISTS: dict[str, str] = {
    "sky": """thin cloud; weak sun; a bank of fog; steady drizzle; broken cloud; clear sky;
heavy snow; hail; sea mist; thunder; a yellow haze; scattered showers""",
    "rainfall": "drizzle; light rain; sleet; a downpour; snow; no rain; hail; fine mist; showers",
    "part": """before noon; towards evening; all through the day; after dark; around dawn; by
teatime; in the small hours; for an hour or so; twice a day; from time to time""",
    "wind": "strong; gentle; biting; shifting; northerly; warm; sharp; fresh; moderate; fierce",
    "compass": "north; south; east; west; north-west; south-east; inland; downhill; upstream",
    "landform": """hill; river; bay; ridge; valley; cliff; lake; marsh; island; forest; canal;
glacier; meadow; gorge; beach; heath; waterfall; harbour; cave; plain""",
    "building": """lighthouse; chapel; windmill; barn; castle; boathouse; school; tower;
greenhouse; bakery; bridge; inn; theatre; tollhouse; cottage; warehouse; temple; observatory""",
    "feel": "wet; dry; mild; cold; warm; damp; cool; brittle; muddy; slippery; soft; quiet; dusty",
    "plant": """sweet peas; tulips; foxgloves; marrows; lilies; ferns; asters; dahlias; poppies;
beans; daisies; pansies; lupins; hollyhocks; irises; gooseberries; snowdrops; peonies; nettles""",
    "vegetable": """carrots; leeks; onions; turnips; mushrooms; tomatoes; peppers; cabbages;
plums; apples; parsnips; beetroots; chestnuts; lemons; pears; lentils; radishes; pumpkins""",
    "fat": "butter; olive oil; goose fat; cream; sesame oil; yoghurt; lard; broth",
    "grain": "rice; flour; barley; oats; sugar; millet; cornmeal; couscous; rye; semolina",
    "spice": "nutmeg; cinnamon; pepper; salt; ginger; mustard; cumin; vanilla; cloves; turmeric",
    "cooked": "golden; tender; crisp; soft; brown at the edges; thick; bubbling; just done",
    "dish": "pie; soup; stew; loaf; pudding; omelette; pancake; salad; cake; dumpling; porridge",
    "taste": "sour; sweet; salty; bitter; rich; plain; smoky; bland; sharp; heavy; famous",
    "size": "small; large; deep; narrow; tall; tiny; round; square; wide; enormous; folding",
    "soil": "sandy; heavy; stony; chalky; rich; poor; wet; black; acid",
    "colour": """red; blue; green; yellow; white; black; grey; purple; orange; pink; brown;
silver; scarlet; violet; cream; turquoise; pale green; dark blue""",
    "bird": """heron; blackbird; owl; kestrel; gull; wren; cuckoo; magpie; swift; puffin; goose;
crane""",
    "vehicle": """train; ferry; bus; tram; bicycle; cable car; barge; coach; steamer; cart;
night bus""",
    "animal": """fox; badger; bear; hare; otter; donkey; goat; mouse; wolf; frog; hedgehog;
camel; toad""",
    "animals": "foxes; badgers; bears; hares; otters; donkeys; goats; mice; wolves; frogs; camels",
    "mood": """proud; clever; lazy; patient; noisy; shy; brave; greedy; cheerful; stubborn;
gentle; curious; sleepy; jealous; honest; lonely; polite; careless; calm; puzzled""",
    "thing": """kettle; umbrella; lantern; clock; violin; ladder; basket; teapot; compass;
saddle; mirror; kite; typewriter; hammer; suitcase; bell; telescope; wheelbarrow; chessboard;
lamp; drum; trunk""",
    "things": """kettles; umbrellas; lanterns; clocks; violins; ladders; baskets; teapots;
mirrors; kites; hammers; suitcases; bells; telescopes; stamps; chairs; hats; shoes; buttons;
maps""",
    "trade": """bakery; bookshop; hat shop; forge; dairy; print works; tannery; florist; toy
shop; post office; boatyard; candle maker; cheese shop; bicycle shop; brewery; glassworks""",
    "material": """bronze; silver; glass; oak; marble; clay; ivory; silk; iron; leather; copper;
wool; amber; slate; velvet; porcelain; tin; granite; paper""",
    "subject": """bees; map making; grammar; the stars; bridges; coins; whales; knots; opera;
algebra; pottery; volcanoes; fishing; chess; poetry; moss; clocks; folk songs; ancient ships;
geology""",
    "part_of": """handle; valve; lid; spring; filter; wheel; hinge; plug; chain; switch; cog;
fuse; belt; nozzle; axle; bracket; gauge; cable""",
    "instrument": "flute; cello; tuba; harp; oboe; banjo; piano; trumpet; bassoon; organ; fiddle",
    "mister": "Mr; Mrs; Ms; Miss; Dr; Mr; Captain; Professor; Sir; Lady",
    "fault": """cracked; bent; loose; noisy; stuck; leaking; dented; worn out; missing; too tight;
rusty; squeaking; off its hinge; slow to start; hot to touch; coming apart; much improved; as good as new;
scratched; slipping; jammed since {month}; out of true; not turning; faded; split in two""",
    "verdict": """fit for a year; not worth mending; ask the owner; try a new {part_of}; all well; leave it
overnight; half done; back to {last}; no charge; watch the {part_of}; oil it weekly; nothing found;
call when ready; two screws short; {gerund} would help; told them so; works if {past}; a fine piece""",
    "initials": "{letters}; {letters}; per {last}; {last}; checked by {mister} {last}",
    "relative_of": "aunt; grandfather; cousin; neighbour; landlady; teacher; captain; niece",
}
